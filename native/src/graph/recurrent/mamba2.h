// The branch of a Mamba-2 layer (arXiv 2405.21060), in ggml's own ops. It takes the place of attention.
#pragma once

#include "graph/recurrent/branch.h"

namespace lkv {

class Mamba2Branch : RecurrentBranch {
public:
    Mamba2Branch(const GraphSources& from, const LayerOps& ops, Graph& graph)
        : RecurrentBranch(from, ops, graph), sizes_(h_.mamba2) {}

    // x: the normed input [n_embd, n_tokens], sequence by sequence, as many tokens each. Returns the branch before the residual, and adds
    // nodes that write the states after the batch.
    ggml_tensor* build(ggml_tensor* x, int il);

private:
    // Channels of [width, n_tokens], as [n, n_each, n_seqs]
    ggml_tensor* cut(ggml_tensor* x, int64_t first, int64_t n) const;
    // Channels of what is convolved, as [width, n, n_each, n_seqs]
    ggml_tensor* parts(ggml_tensor* x, int64_t first, int64_t width, int64_t n) const;
    // What heads give out, [head_dim, n_heads, n_each, n_seqs], before the gate
    ggml_tensor* recur(ggml_tensor* mixed, ggml_tensor* step, const Mamba2Weights& w, int il);

    const Mamba2Sizes& sizes_;
};

}  // namespace lkv
