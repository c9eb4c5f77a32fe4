// The attention branch of a layer: projections, our two nodes (store the batch's rows, attend to the cache), and the output.
#pragma once

#include "graph/graph.h"
#include "graph/layer_ops.h"
#include "graph/projections.h"
#include "graph/step/route.h"

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
          projections_(ops, from.model, from.ropes, from.constants, graph.roles, graph.positions, graph.temperatures),
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

    struct Attended {
        ggml_tensor* out;     // [head_dim, n_head, n_tokens]
        ggml_tensor* masses;  // to be drawn behind it: under eviction, what is added to the layer's; else null
    };

    // The full rows of exact windows and the rows of the middle, each if a token of the batch goes there.
    struct Rows {
        std::optional<BatchRows> full;
        std::optional<BatchRows> latents;
    };

    Reads read_cache(ggml_tensor* q, const Rows& rows, const Route& route, int il);
    Reads read_exact(ggml_tensor* q, const Rows& rows, const Heads& heads, const Route& route, int il);
    Attended attended(const Reads& reads, int il);
    // Draws these and what leads to them; returns the number of the node that comes next.
    int drawn(std::initializer_list<ggml_tensor*> tensors) const;
    // Draws what leads to K's rows and then to V's, and notes where each is and the store comes; after the store the queries, and `out`.
    LayerRoles draw_rows(ggml_tensor* x, const Heads& heads, const Rows& rows) const;
    void draw_attention(LayerRoles& roles, const Reads& reads, ggml_tensor* out) const;
    ggml_tensor* gated(ggml_tensor* x, ggml_tensor* gate) const;
    ggml_tensor* output(ggml_tensor* attended, ggml_tensor* gate, const Route& route, int il) const;

    AttentionNode& attention_node(int il, int kv, const Route& route, const Queries& q, bool split);
    // Parameters of every problem of a layer, of rebuilt rows, and of one problem.
    void describe(LatentAttnParams& p, int il) const;
    void describe_rebuild(LatentAttnParams& p, int il) const;
    void describe_full(LatentAttnParams& p, const LayerCacheSpec& spec, int il) const;
    void describe_latents(LatentAttnParams& p, const LayerCacheSpec& spec, Route::Keys keys, int il) const;

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
