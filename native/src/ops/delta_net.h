// Gated delta nets: what every implementation computes alike, and which decode steps a GPU takes as one kernel
// (ops/cuda/recurrent/delta_net.h). All others are ggml's operators.
#pragma once

#include <cstdint>

namespace lkv {

// Queries and keys are divided by √(their squared length + this), as transformers does whatever the eps of norms. ggml_l2_norm takes the
// greater of length and eps instead: another vector where heads are short.
constexpr float delta_net_length_eps = 1e-6f;

constexpr int delta_net_tokens = 8;  // of a sequence, at most
constexpr int delta_net_conv = 4;    // inputs that a convolution sees, at most

constexpr bool delta_net_takes(int head_dim, int d_conv, int64_t n_each) {
    return (head_dim == 32 || head_dim == 64 || head_dim == 128) && d_conv >= 2 && d_conv <= delta_net_conv &&
           n_each <= delta_net_tokens;
}

}  // namespace lkv
