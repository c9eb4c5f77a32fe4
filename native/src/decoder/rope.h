// Rotary frequencies of the file, every scaling resolved to tables: theta_i(pos) = pos · freqs[i], cos and sin times mscale.
#pragma once

#include <vector>

#include "decoder/hparams.h"
#include "gguf/reader.h"

namespace lkv {

struct Rope {
    std::vector<float> freqs;  // [n_rot/2] radians per position; empty: no RoPE
    // base^(-2i/n_rot) / freqs[i]: the same table as ggml_rope_ext's divisors. [widest head_dim/2], ones after n_rot/2: ggml's CPU reads a
    // divisor for each pair of a head, those that are not rotated too.
    std::vector<float> ggml_factors;
    float base = 10000.0F;
    float mscale = 1.0F;

    bool rotates() const { return !freqs.empty(); }
};

// Layers with equal frequencies share a table.
struct Ropes {
    std::vector<Rope> tables;
    std::vector<size_t> of_layer;  // [n_layer] place in tables

    const Rope& of(int il) const { return tables[of_layer[static_cast<size_t>(il)]]; }
};

// Factor of scores in a model with MLA: 1/sqrt of a head's key length, and what YaRN makes of it.
float read_mla_scale(const GgufFile& file, const HParams& hparams);

// n_ctx: the served context; it decides the base of dynamic NTK and the long or short factors of longrope.
Ropes read_ropes(const GgufFile& file, const HParams& hparams, int n_ctx);

}  // namespace lkv
