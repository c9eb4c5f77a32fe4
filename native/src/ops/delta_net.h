// Which decode steps of a gated delta net a GPU takes as one kernel (ops/cuda/recurrent/delta_net.h). All others are ggml's operators.
#pragma once

#include <cstdint>

namespace lkv {

constexpr int delta_net_tokens = 8;  // of a sequence, at most
constexpr int delta_net_conv = 4;    // inputs that a convolution sees, at most

constexpr bool delta_net_takes(int head_dim, int d_conv, int64_t n_each) {
    return (head_dim == 32 || head_dim == 64 || head_dim == 128) && d_conv >= 2 && d_conv <= delta_net_conv &&
           n_each <= delta_net_tokens;
}

}  // namespace lkv
