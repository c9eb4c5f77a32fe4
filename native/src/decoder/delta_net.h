// The sizes of a gated delta net (arXiv 2412.06464): a layer that mixes tokens by a recurrence instead of attention.
#pragma once

#include <cstdint>
#include <string>

#include "gguf/reader.h"

namespace lkv {

struct DeltaNetSizes {
    int d_conv = 0;    // inputs that a convolution's output depends on
    int head_dim = 0;  // of keys and values
    int n_k_heads = 0;
    int n_v_heads = 0;

    int64_t key_width() const { return int64_t{n_k_heads} * head_dim; }
    int64_t value_width() const { return int64_t{n_v_heads} * head_dim; }
    int64_t channels() const { return 2 * key_width() + value_width(); }  // that are convolved: Q, K and V
    // A layer's state of one sequence, f32: the last inputs of the convolution [d_conv - 1, channels] and a matrix per head
    // [head_dim, head_dim, n_v_heads].
    int64_t conv_floats() const { return (d_conv - 1) * channels(); }
    int64_t matrix_floats() const { return value_width() * head_dim; }
};

// From the stock keys `<architecture>.ssm.*`. Errors: Error when one is missing, out of range, or contradicts another.
DeltaNetSizes read_delta_net(const GgufFile& file, const std::string& architecture);

}  // namespace lkv
