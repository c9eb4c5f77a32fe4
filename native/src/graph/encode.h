// Latents of full K or V: z_g = E[g] x_g for every group.
#pragma once

#include <functional>
#include <vector>

#include "cache/spec/cache_spec.h"
#include "ggml.h"
#include "graph/step/roles.h"

namespace lkv {

// [a, b, c] -> [a, c, b], contiguous; with one token that is the same memory.
ggml_tensor* swapped(ggml_context* ctx, ggml_tensor* x);

// w [a, r, n], x [a, heads, n_tokens] -> [r, heads, n_tokens], heads in n runs; what is made is noted. held: receives intermediate tensors.
using Held = std::function<ggml_tensor*(ggml_tensor*)>;
ggml_tensor* heads_product(ggml_context* ctx, ggml_tensor* w, ggml_tensor* x, const Held& held,
                           std::vector<FactorProduct>& made);

// e [group·head_dim, Σ rank], x [head_dim, n_kv, n_tokens] -> [Σ rank, n_tokens].
ggml_tensor* encode(ggml_context* ctx, ggml_tensor* e, ggml_tensor* x, const TensorSpec& spec, const Held& held,
                    std::vector<FactorProduct>& made);

}  // namespace lkv
