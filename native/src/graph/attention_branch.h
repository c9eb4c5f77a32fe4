// The attention branch of a layer: projections, our two nodes (store the batch's rows, attend to the cache), and the output.
#pragma once

#include "graph/graph.h"
#include "graph/layer_ops.h"
#include "graph/projections.h"

namespace lkv {

// The inputs that a graph is built from.
struct GraphSources {
    const Model& model;
    KvCache& cache;
    const Ropes& ropes;
    const GraphConstants& constants;
    const StateTensors* states;  // of recurrent layers, else null
    const BatchSlots& batch;
    const GraphShape& shape;
    const ExactRows* exact;  // for a lazy prefill, else null
};

// Inputs of the reference expression, shared by layers of one kind.
ReferenceInputs& reference_inputs(const GraphSources& from, Graph& graph, int il);

class AttentionBranch {
public:
    // The graph already has its inputs. All arguments must outlive this.
    AttentionBranch(const GraphSources& from, const LayerOps& ops, Graph& graph)
        : from_(from),
          h_(from.model.hparams()),
          ops_(ops),
          ctx_(ops.context()),
          graph_(graph),
          projections_(ops, from.model, from.ropes, from.constants, graph.positions, graph.temperatures),
          stored_(static_cast<size_t>(h_.n_layer), nullptr) {}

    // x: the normed input [n_embd, n_tokens]. Returns the branch before the residual, and adds nodes that write rows.
    ggml_tensor* build(ggml_tensor* x, int il);

private:
    // The inputs of attention: its queries, and the token tensor that the stored rows depend on.
    struct Reads {
        AttentionNode& node;
        Queries q;
        ggml_tensor* stored;
    };

    // The full rows of exact windows and the rows of the middle, each if a token of the batch goes there.
    struct Rows {
        std::optional<BatchRows> full;
        std::optional<BatchRows> latents;
    };

    Reads read_cache(ggml_tensor* q, const Rows& rows, int il);
    Reads read_exact(ggml_tensor* q, const Rows& rows, const Heads& heads, int il);
    ggml_tensor* attended(const Reads& reads, int il);
    ggml_tensor* gated(ggml_tensor* x, ggml_tensor* gate) const;
    ggml_tensor* output(ggml_tensor* attended, ggml_tensor* gate, int il) const;

    // Whether queries stay in their heads' space and E_q turns latents into keys. For many queries this is less work than products
    // with latents wider than a head. (A GPU expands a chunk of the cache for all of them.)
    bool expands_keys(int il) const;
    // Whether a GPU's attention takes V's Hadamard rotation back: as it merges the parts of few tokens, without a launch of its own.
    bool rotates_results(int kv) const;
    AttentionNode& attention_node(int il, int kv, const Queries& q, bool split);
    // Parameters of every problem of a layer, of rebuilt rows, and of one problem.
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
    std::vector<ggml_tensor*> stored_;  // of every layer with rows of its own: what its store node returned
};

}  // namespace lkv
