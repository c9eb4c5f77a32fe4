// The branch of a layer that is a gated delta net (arXiv 2412.06464), in ggml's own ops. It takes the place of attention.
#pragma once

#include "graph/attention_branch.h"

namespace lkv {

class DeltaNetBranch {
public:
    // The graph already has its inputs. All arguments must outlive this.
    DeltaNetBranch(const GraphSources& from, const LayerOps& ops, Graph& graph)
        : from_(from),
          h_(from.model.hparams()),
          sizes_(h_.delta_net),
          ops_(ops),
          ctx_(ops.context()),
          graph_(graph),
          n_seqs_(from.shape.n_seqs),
          n_each_(from.shape.n_tokens / from.shape.n_seqs),
          n_states_(from.shape.n_states) {}

    // x: the normed input [n_embd, n_tokens], sequence by sequence, as many tokens each. Returns the branch before the residual, and adds
    // nodes that write the states after the batch.
    ggml_tensor* build(ggml_tensor* x, int il);

private:
    struct Gates {
        ggml_tensor* decay;  // [1, n_v_heads, n_each, n_seqs], logarithms
        ggml_tensor* beta;
    };
    struct Inputs {
        ggml_tensor* qkv;   // [channels, n_tokens]
        ggml_tensor* gate;  // [value_width, n_tokens], of the output
    };
    Inputs inputs(ggml_tensor* x, const DeltaNetWeights& w) const;
    // Q, K and V after the convolution [channels, n_each, n_seqs]
    ggml_tensor* convolved(ggml_tensor* qkv, const DeltaNetWeights& w, int il);
    Gates gates(ggml_tensor* x, const DeltaNetWeights& w) const;
    // Heads of what is convolved, [head_dim, n_heads, n_each, n_seqs]; first: their first channel
    ggml_tensor* heads(ggml_tensor* qkv, int64_t first, int64_t n_heads) const;
    // Keys or queries: of unit length, as many heads as the recurrence wants.
    ggml_tensor* unit_heads(ggml_tensor* qkv, int64_t first, const DeltaNetWeights& w) const;
    // [head_dim, n_v_heads, n_each, n_seqs]
    ggml_tensor* recur(ggml_tensor* qkv, const Gates& gates, const DeltaNetWeights& w, int il);
    void store(ggml_tensor* states, ggml_tensor* rows, ggml_tensor* to);

    const GraphSources& from_;
    const HParams& h_;
    const DeltaNetSizes& sizes_;
    const LayerOps& ops_;
    ggml_context* ctx_;
    Graph& graph_;
    int64_t n_seqs_;
    int64_t n_each_;    // tokens of a sequence
    int64_t n_states_;  // after as many of its last tokens
};

}  // namespace lkv
