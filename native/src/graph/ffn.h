// The FFN of a layer in stock ggml ops: dense, experts that a router chooses for each token, or both.
#pragma once

#include "ggml.h"
#include "model/model.h"

namespace lkv {

// The most nodes that ffn() adds.
int ffn_nodes(const HParams& hparams);

ggml_tensor* activated(ggml_context* ctx, Activation activation, ggml_tensor* x);

// x: the normed input [n_embd, n_tokens]; hidden: before the norm. Returns the branch before the residual, of the same shape. What ggml-cuda fuses is added to
// `nodes` in the order that it knows.
ggml_tensor* ffn(ggml_context* ctx, ggml_cgraph* nodes, const HParams& hparams, const LayerWeights& layer, int il,
                 ggml_tensor* x, ggml_tensor* hidden);

}  // namespace lkv
