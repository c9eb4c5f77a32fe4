// The heads of several tokens, each times the matrix of its group: E_q, or E_k and E_v. ggml puts the heads of a matrix beside one another
// first, and back after its product: six launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace lkv::cuda {

// y[t][h][r] = Σ_d w[h / heads_of_matrix][r][d] · x[t][h][d], of all heads of n_matrices.
struct HeadsProductArgs {
    const uint16_t* w;  // [n_matrices, n_out, n_in] f16; rows start on 16 bytes
    const float* x;     // [n_tokens, heads, n_in], on 16 bytes
    float* y;           // [n_tokens, heads, n_out]
    int64_t w_row;      // values from row to row
    int64_t w_matrix;   // values from matrix to matrix
    int32_t n_in;       // a multiple of heads_product_step
    int32_t n_out;
    int32_t n_matrices;
    int32_t heads_of_matrix;
    int32_t n_tokens;
};
constexpr int heads_product_step = 32;

cudaError_t multiply_heads(const HeadsProductArgs& args, cudaStream_t stream);

}  // namespace lkv::cuda
