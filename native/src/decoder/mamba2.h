// The sizes of a Mamba-2 layer (arXiv 2405.21060): a layer that mixes tokens by a recurrence instead of attention.
#pragma once

#include <cstdint>
#include <string>

#include "gguf/reader.h"

namespace lkv {

struct Mamba2Sizes {
    int d_conv = 0;    // inputs that a convolution's output depends on
    int d_state = 0;   // numbers that are kept of each channel
    int n_heads = 0;   // which have a decay each
    int head_dim = 0;  // channels of a head
    int n_groups = 0;  // of heads that share what they read of and write into their states

    int64_t inner() const { return int64_t{n_heads} * head_dim; }
    int64_t shared() const { return int64_t{n_groups} * d_state; }
    int64_t channels() const { return inner() + 2 * shared(); }  // that are convolved
    // A layer's state of one sequence, f32: the last inputs of the convolution [d_conv - 1, channels] and [d_state, head_dim, n_heads].
    int64_t conv_floats() const { return (d_conv - 1) * channels(); }
    int64_t matrix_floats() const { return inner() * d_state; }
};

// From the stock keys `<architecture>.ssm.*`. Errors: Error when one is missing, out of range, or contradicts another.
Mamba2Sizes read_mamba2(const GgufFile& file, const std::string& architecture);

}  // namespace lkv
