// A gated delta net in a decode step: all that lies between the products of its input and that of its output, in one kernel. As ggml-cuda's
// operators it is some twenty launches, which in a model of 27B take longer than its weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/delta_net.h"

namespace lkv::cuda {

// A token's channels: Q of all K heads, K of them, V of all V heads.
struct DeltaNetArgs {
    const float* qkv;   // [n_tokens, channels] before the convolution; n_tokens = n_seqs · n_each, sequence by sequence
    const float* gate;  // [n_tokens, n_v · head_dim], of the output, before SiLU
    const float*
        beta;  // [n_tokens, n_v] before the sigmoid; with `grouped` [n_tokens, n_k, 2, n_v / n_k], which are beta and alpha
    const float* alpha;       // [n_tokens, n_v]; with `grouped` the same as beta
    const float* kernels;     // [channels, d_conv], the latest input last
    const float* decay;       // [n_v]
    const float* decay_bias;  // [n_v]
    const float* norm;        // [head_dim], of a head's output
    float* conv_states;       // [n_slots, channels, d_conv - 1]
    float* matrices;          // [n_slots, n_v, head_dim of V, head_dim of K]
    const int32_t* from;      // [n_seqs] slots that are read
    const int64_t*
        to;  // [n_states, n_seqs] slots that are written: the state after the last token, after the one before it, …
    float* out;  // [n_tokens, n_v · head_dim]
    int32_t qkv_row, gate_row, beta_row,
        alpha_row;  // numbers from token to token, where products make more than one of them
    int32_t n_k;
    int32_t n_v;       // a multiple of n_k
    int32_t head_dim;  // 32, 64 or 128
    int32_t d_conv;    // 2 … delta_net_conv
    int32_t n_seqs;
    int32_t n_each;    // 1 … delta_net_tokens
    int32_t n_states;  // 1 … n_each
    int32_t grouped;   // 1: V heads of a K head follow each other; 0: V head h has K head h modulo n_k
    float norm_eps;
};

// Errors: cudaErrorInvalidValue where delta_net_takes() is false.
cudaError_t delta_net(const DeltaNetArgs& args, cudaStream_t stream);

}  // namespace lkv::cuda
