// Many small matrices, each times a few vectors: E_q and E_k of a decode step. ggml-cuda gives every row of a matrix a thread
// block, which for 4096 rows of 128 channels took 45 us where the bytes take one.
#pragma once

#include <cuda_runtime_api.h>

#include <bit>
#include <cstdint>

#include "ops/cuda/step/turn.h"

namespace lkv::cuda {

constexpr int product_columns = 8;  // vectors of one matrix, at most

// y[i][r] = Σ_d w[i / n_columns][r][d] · x[i][d], i = 0 … n_matrices·n_columns - 1.
struct ProductArgs {
    const uint16_t* w;  // [n_matrices, n_out, n_in] f16; rows start on 16 bytes
    const float* x;     // [n_matrices·n_columns, n_in]
    float* y;           // [n_matrices·n_columns, n_out]
    int64_t w_row;      // values from row to row
    int64_t w_matrix;   // values from matrix to matrix
    int32_t n_in;       // a multiple of 8
    int32_t n_out;
    int32_t n_matrices;
    int32_t n_columns;  // 1 … product_columns
    RopeTurn turn;
};

// What a thread block takes: the vectors, of which 1, 2, 4 or 8 are taken at once, and angles.
constexpr int64_t product_shared_bytes(int64_t n_in, int64_t n_columns) {
    return static_cast<int64_t>(sizeof(float)) *
           (n_in * static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n_columns))) + max_rot);
}

cudaError_t multiply(const ProductArgs& args, cudaStream_t stream);

}  // namespace lkv::cuda
