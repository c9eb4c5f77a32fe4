// The branch of a Mamba-2 layer (arXiv 2405.21060), in ggml's own ops.
#pragma once

#include "graph/recurrent/branch.h"

namespace lkv {

class Mamba2Branch : public RecurrentBranch {
public:
    Mamba2Branch(const Mamba2Sizes& sizes, const GraphSources& from, const LayerOps& ops, Graph& graph)
        : RecurrentBranch(from, ops, graph), sizes_(sizes) {}

    ggml_tensor* build(ggml_tensor* x, int il) override;

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
