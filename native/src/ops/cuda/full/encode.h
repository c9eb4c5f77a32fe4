// Tokens that leave the exact window: their full rows become latents, z = E x.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/problem.h"

namespace lkv::cuda {

struct EncodeSide {
    const uint8_t* rows;  // of the exact window
    int64_t row_bytes;
    const SegmentLayout* segments;
    int32_t n_segments;
    const uint16_t* e;      // f16 [Σ rank][group·head_dim]; null: z = x
    const int32_t* column;  // [Σ rank] first channel of x that a row of E reads
    int32_t n_out;          // Σ rank
    int32_t n_in;           // group·head_dim
    int32_t width;          // channels of x
    uint16_t* x;            // f16 [n][width], scratch
    float* z;               // [n][n_out]
};

struct EncodeArgs {
    EncodeSide k;
    EncodeSide v;
    const int32_t* slots;  // [n] of the exact window
    int32_t n;
};

cudaError_t encode_rows(const EncodeArgs& args, cudaStream_t stream);

}  // namespace lkv::cuda
