// Rotary frequencies of the file, every scaling resolved to one table: theta_i(pos) = pos · freqs[i], cos and sin times mscale.
#pragma once

#include <vector>

#include "gguf/reader.h"
#include "model/hparams.h"

namespace lkv {

struct Rope {
    std::vector<float> freqs;  // [n_rot/2] radians per position
    std::vector<float>
        ggml_factors;  // [n_rot/2] base^(-2i/n_rot) / freqs[i]: the same table as ggml_rope_ext's divisors
    float base = 10000.0F;
    float mscale = 1.0F;
};

// n_ctx: the served context; it decides the base of dynamic NTK and the long or short factors of longrope.
Rope read_rope(const GgufFile& file, const HParams& hparams, int n_ctx);

}  // namespace lkv
