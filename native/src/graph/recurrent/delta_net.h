// The branch of a layer that is a gated delta net (arXiv 2412.06464), in ggml's own ops.
#pragma once

#include "graph/recurrent/branch.h"

namespace lkv {

class DeltaNetBranch : public RecurrentBranch {
public:
    DeltaNetBranch(const DeltaNetSizes& sizes, const GraphSources& from, const LayerOps& ops, Graph& graph)
        : RecurrentBranch(from, ops, graph), sizes_(sizes) {}

    ggml_tensor* build(ggml_tensor* x, int il) override;

private:
    struct Gates {
        ggml_tensor* decay;  // [1, n_v_heads, n_each, n_seqs], logarithms
        ggml_tensor* beta;
    };
    // All after the products of x, before that of the output, as one node [value_width, n_tokens]
    ggml_tensor* step(ggml_tensor* x, const DeltaNetWeights& w, int il);
    bool is_step() const;  // of a GPU, and few tokens
    struct Inputs {
        ggml_tensor* qkv;   // [channels, n_tokens]
        ggml_tensor* gate;  // [value_width, n_tokens], of the output
    };
    Inputs inputs(ggml_tensor* x, const DeltaNetWeights& w) const;
    Inputs unpacked(ggml_tensor* all) const;  // of the older layout
    Gates gates(ggml_tensor* x, const DeltaNetWeights& w) const;
    // Heads of what is convolved, [head_dim, n_heads, n_each, n_seqs]; first: their first channel
    ggml_tensor* heads(ggml_tensor* qkv, int64_t first, int64_t n_heads) const;
    // Keys or queries: of unit length where they are not tiny, as many heads as the recurrence wants.
    ggml_tensor* unit_heads(ggml_tensor* qkv, int64_t first, const DeltaNetWeights& w) const;
    // [head_dim, n_v_heads, n_each, n_seqs]
    ggml_tensor* recur(ggml_tensor* qkv, const Gates& gates, const DeltaNetWeights& w, int il);

    const DeltaNetSizes& sizes_;
};

}  // namespace lkv
