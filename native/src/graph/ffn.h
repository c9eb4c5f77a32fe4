// The FFN of a layer in stock ggml ops: one for all tokens, or experts of which a router chooses some for each.
#pragma once

#include "ggml.h"
#include "model/model.h"

namespace lkv {

// Nodes of ffn() at most.
int ffn_nodes(const HParams& hparams);

// x: the normed input [n_embd, n_tokens]; returns the branch before the residual, of the same shape. What ggml-cuda fuses is added to
// `nodes` in the order that it knows.
ggml_tensor* ffn(ggml_context* ctx, ggml_cgraph* nodes, const HParams& hparams, const LayerWeights& layer,
                 ggml_tensor* x);

}  // namespace lkv
