// The attention branch of a layer: projections, two nodes of ours (store the batch's rows, attend to the cache's), the output.
#pragma once

#include "graph/graph.h"
#include "graph/layer_ops.h"
#include "graph/projections.h"

namespace lkv {

// What a graph is built from.
struct GraphSources {
    const Model& model;
    KvCache& cache;
    const Ropes& ropes;
    const GraphConstants& constants;
    const BatchSlots& batch;
    const GraphShape& shape;
    const ExactRows* exact;  // of a lazy prefill, else null
};

// Inputs of the reference expression that a layer shares with others of its kind.
ReferenceInputs& reference_inputs(const GraphSources& from, Graph& graph, int il);

class AttentionBranch {
public:
    // The graph has its inputs already. All are referred to.
    AttentionBranch(const GraphSources& from, const LayerOps& ops, Graph& graph)
        : from_(from),
          h_(from.model.hparams()),
          ops_(ops),
          ctx_(ops.context()),
          graph_(graph),
          projections_(ops, from.model, from.ropes, from.constants, graph.positions) {}

    // x: the normed input [n_embd, n_tokens]; returns what the branch adds to the hidden state. Adds nodes that write rows.
    ggml_tensor* build(ggml_tensor* x, int il);

private:
    // What attention reads: its queries, and the token that says the batch's rows are stored.
    struct Reads {
        AttentionNode& node;
        Queries q;
        ggml_tensor* stored;
    };

    // Full rows of exact windows, and rows of the middle; each where a token of the batch goes there.
    struct Rows {
        std::optional<BatchRows> full;
        std::optional<BatchRows> latents;
    };

    Reads read_cache(ggml_tensor* q, const Rows& rows, int il);
    Reads read_exact(ggml_tensor* q, const Rows& rows, const Heads& heads, int il);
    ggml_tensor* attended(const Reads& reads, int il);
    ggml_tensor* output(ggml_tensor* attended, int il) const;

    // Whether the queries stay in their heads' space and E_q makes keys of the latents: for many queries that is less work than
    // products with latents wider than a head. (A GPU expands a part of the cache for all of them.)
    bool expands_keys(int il) const;
    AttentionNode& attention_node(int il, const Queries& q, bool split);
    // What every problem of a layer has; what rows have that are rebuilt; one problem's own.
    void describe(LatentAttnParams& p, int il) const;
    void describe_rebuild(LatentAttnParams& p, int il) const;
    void describe_full(LatentAttnParams& p, const LayerCacheSpec& spec, int il) const;
    void describe_latents(LatentAttnParams& p, const LayerCacheSpec& spec, int il) const;

    const LayerCacheSpec& spec_of(int il) const { return from_.model.cache_spec().layers[static_cast<size_t>(il)]; }
    const LayerWeights& weights_of(int il) const { return from_.model.layers()[static_cast<size_t>(il)]; }

    const GraphSources& from_;
    const HParams& h_;
    const LayerOps& ops_;
    ggml_context* ctx_;
    Graph& graph_;
    Projections projections_;
};

}  // namespace lkv
