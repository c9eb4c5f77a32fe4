// The sizes of a gated short convolution (LFM2): a layer that mixes a token with the few before it instead of attention.
#pragma once

#include <cstdint>
#include <string>

#include "gguf/reader.h"

namespace lkv {

struct ShortConvSizes {
    int d_conv = 0;  // inputs that a convolution's output depends on
    int n_embd = 0;  // channels, all of them convolved

    // A layer's state of one sequence, f32: the last inputs of the convolution [d_conv - 1, n_embd], and no matrices.
    int64_t conv_floats() const { return int64_t{d_conv - 1} * n_embd; }
    int64_t matrix_floats() const { return 0; }
};

// From the stock key `<architecture>.shortconv.l_cache`. Errors: Error when it is missing or out of range.
ShortConvSizes read_short_conv(const GgufFile& file, const std::string& architecture, int n_embd);

}  // namespace lkv
