// Latents of full K or V: z_g = E[g] x_g for every group.
#pragma once

#include <functional>

#include "cache/spec/cache_spec.h"
#include "ggml.h"

namespace lkv {

// [a, b, c] -> [a, c, b], contiguous; with one token that is the same memory.
ggml_tensor* swapped(ggml_context* ctx, ggml_tensor* x);

// e [group·head_dim, Σ rank], x [head_dim, n_kv, n_tokens] -> [Σ rank, n_tokens]. held: receives every intermediate tensor.
ggml_tensor* encode(ggml_context* ctx, ggml_tensor* e, ggml_tensor* x, const TensorSpec& spec,
                    const std::function<ggml_tensor*(ggml_tensor*)>& held);

}  // namespace lkv
