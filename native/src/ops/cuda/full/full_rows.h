// Full rows as attention reads them, in f16: keys that an exact window stores before bias, norm and RoPE, and a batch's own K and V, which
// no region shows yet.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/kernel.h"

namespace lkv::cuda {

struct FullRows {
    // of the exact windows, where keys are stored raw; rows null: they are read where they lie
    struct Region {
        const uint8_t* rows;
        int64_t page;
        int32_t row_bytes;
        const SegmentLayout* segments;  // one a head
        const int32_t* pos;
        uint8_t* to;       // f16 [slots][n_kv][head_dim]
        int32_t capacity;  // slots
    };
    Region regions[max_regions - 1];
    bool raw;

    // of the batch: f32 [n_own][n_kv][head_dim]; null: its rows are in the regions
    const float* own_k;
    const float* own_v;
    int64_t own_stride;  // floats
    const int32_t* own_pos;
    uint8_t* own_k_to;
    uint8_t* own_v_to;
    int32_t n_own;
};

// args: the shape, the slots in use of every region, and what finishes a key.
cudaError_t make_full_rows(const FullRows& rows, const Problem& problem, cudaStream_t stream);

// Tokens that leave the exact window: their full rows become latents, z = E x.

struct EncodeSide {
    const uint8_t* rows;  // of the exact window
    int64_t page;
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
