// RoPE of one token's heads, by a kernel of its own or by a product as it loads them. The kernel lets the next one be set up on its first
// line; ggml-cuda's for neighbouring dimensions does when it ends. It multiplies with a Hadamard matrix too where rows are stored so.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace lkv::cuda {

// By which angles vectors are turned.
struct RopeTurn {
    const uint64_t* phases;  // [n_rot / 2], see pack_phases; null: not turned
    const int32_t* pos;      // the token's
    int32_t head_dim;        // vectors are whole heads
    int32_t n_rot;           // at most max_rot
    int32_t neox;            // 1: planes of dimensions i and i + n_rot / 2; 0: 2i and 2i + 1
    float mscale;
};
constexpr int max_rot = 256;
constexpr int max_turned = 512;  // head_dim of what the kernel turns

// y[h] = x[h] turned, then times the orthonormal Hadamard matrix, h = 0 … n_heads - 1. y may be x.
struct TurnArgs {
    RopeTurn turn;
    const float* x;  // [n_heads, head_dim], both start on 16 bytes and head_dim is a multiple of 4
    float* y;
    int32_t n_heads;
    int32_t hadamard;  // channels of a Hadamard block, a power of two that divides head_dim, at least 4; 0: none
};

cudaError_t turn_heads(const TurnArgs& args, cudaStream_t stream);

}  // namespace lkv::cuda
