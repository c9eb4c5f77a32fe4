#include "graph/graph.h"

#include "graph/attention_branch.h"
#include "graph/ffn.h"
#include "graph/recurrent/delta_net.h"

namespace lkv {
namespace {

constexpr size_t max_nodes_per_layer = 80;

class Builder {
public:
    Builder(const GraphSources& from, Graph& graph)
        : from_(from),
          model_(from.model),
          h_(from.model.hparams()),
          shape_(from.shape),
          graph_(graph),
          ctx_(graph.context.get()),
          ops_(ctx_, h_, from.shape.on_gpu && from.shape.n_tokens <= small_batch) {}

    void build();

private:
    int first_layer() const { return shape_.first_layer; }
    int end_layer() const { return shape_.end_layer < 0 ? h_.n_layer : shape_.end_layer; }
    bool has_rope() const;
    bool has_recurrence() const;
    ggml_tensor* input(ggml_type type, int64_t ne0, int64_t ne1, const char* name);
    ggml_tensor* begin();
    void add_reference_inputs();
    // A branch's input x, normed; without a weight x itself.
    ggml_tensor* normed(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias) const {
        return weight == nullptr ? x : ops_.norm(x, weight, bias);
    }
    ggml_tensor* fed(ggml_tensor* x, ggml_tensor* hidden, const LayerWeights& layer) {
        return ffn(ctx_, graph_.nodes, h_, layer, x, hidden);
    }
    ggml_tensor* added(ggml_tensor* x, ggml_tensor* branch, ggml_tensor* post_norm) const;
    ggml_tensor* rescaled(ggml_tensor* x, const LayerWeights& layer) const {
        return layer.output_scale == nullptr ? x : ggml_mul(ctx_, x, layer.output_scale);
    }
    ggml_tensor* layer(AttentionBranch& attention, DeltaNetBranch& delta_net, ggml_tensor* x, int il);
    ggml_tensor* output(ggml_tensor* x) const;

    const GraphSources& from_;
    const Model& model_;
    const HParams& h_;
    const GraphShape& shape_;
    Graph& graph_;
    ggml_context* ctx_;
    LayerOps ops_;
};

ggml_tensor* Builder::input(ggml_type type, int64_t ne0, int64_t ne1, const char* name) {
    ggml_tensor* const t = ggml_new_tensor_2d(ctx_, type, ne0, ne1);
    ggml_set_input(t);
    ggml_set_name(t, name);
    return t;
}

// Whether a layer of this graph rotates its queries and keys by their positions.
bool Builder::has_rope() const {
    for (int il = first_layer(); il < end_layer(); il++) {
        if (h_.attends(il) && from_.ropes.of(il).turns()) return true;
    }
    return false;
}

bool Builder::has_recurrence() const {
    for (int il = first_layer(); il < end_layer(); il++) {
        if (!h_.attends(il)) return true;
    }
    return false;
}

// The inputs of the graph; returns what its first layer reads.
ggml_tensor* Builder::begin() {
    const int64_t n_tokens = shape_.n_tokens;
    const bool embeds = shape_.first_layer == 0;
    const bool learned = embeds && h_.block.position == Position::learned;
    if (learned || has_rope()) {
        graph_.positions = input(GGML_TYPE_I32, n_tokens, 1, "positions");
    }
    if (has_recurrence()) {
        graph_.states_from = input(GGML_TYPE_I32, shape_.n_seqs, 1, "states_from");
        graph_.states_to = input(GGML_TYPE_I64, shape_.n_seqs, 1, "states_to");
    }
    if (!embeds) {
        graph_.hidden_in = input(GGML_TYPE_F32, h_.n_embd, n_tokens, "hidden");
        return graph_.hidden_in;
    }
    ggml_tensor* x = nullptr;  // [n_embd, n_tokens]
    if (model_.on_gpu()) {
        // one row of the table, of any quantized type: 16 KiB a token to copy instead of a second table on the GPU
        x = graph_.embeddings = input(GGML_TYPE_F32, h_.n_embd, n_tokens, "embeddings");
    } else {
        graph_.tokens = input(GGML_TYPE_I32, n_tokens, 1, "tokens");
        x = ggml_get_rows(ctx_, model_.token_embd(), graph_.tokens);
    }
    x = ops_.scaled(x, h_.block.embedding_scale);
    return learned ? ggml_add(ctx_, x, ggml_get_rows(ctx_, model_.position_embd(), graph_.positions)) : x;
}

void Builder::add_reference_inputs() {
    const int64_t n_tokens = shape_.n_tokens;
    graph_.reference.n_slots = shape_.n_slots;
    graph_.ring_reference.n_slots = shape_.n_ring_slots;
    graph_.reference.n_exact = shape_.n_exact;
    graph_.ring_reference.n_exact = shape_.n_exact;
    for (ReferenceInputs& inputs : graph_.evicting) {
        inputs.n_slots = shape_.n_evicting_slots;
        inputs.n_exact = shape_.n_exact;
        inputs.mass_weight = input(GGML_TYPE_F32, n_tokens, 1, "mass_weight");
        inputs.mass_cold = input(GGML_TYPE_F32, 1, n_tokens, "mass_cold");
    }
    for (int il = first_layer(); il < end_layer(); il++) {
        if (!h_.attends(il)) continue;
        ReferenceInputs& inputs = reference_inputs(from_, graph_, il);
        ggml_tensor*& mask = inputs.masks[h_.block.layers[static_cast<size_t>(il)].window];
        if (mask == nullptr) mask = input(GGML_TYPE_F32, inputs.n_slots, n_tokens, "mask");
        if (inputs.slot_pos == nullptr) inputs.slot_pos = input(GGML_TYPE_I32, inputs.n_slots, 1, "slot_pos");
    }
}

// The hidden state x and what a branch adds to it.
ggml_tensor* Builder::added(ggml_tensor* x, ggml_tensor* branch, ggml_tensor* post_norm) const {
    if (post_norm != nullptr) branch = ops_.norm(branch, post_norm, nullptr);
    return ggml_add(ctx_, x, ops_.scaled(branch, h_.block.residual_scale));
}

// The hidden state behind a layer; null behind the last one where only its rows are wanted.
ggml_tensor* Builder::layer(AttentionBranch& attention, DeltaNetBranch& delta_net, ggml_tensor* x, int il) {
    const LayerWeights& weights = model_.layers()[static_cast<size_t>(il)];
    ggml_tensor* input = normed(x, weights.attn_norm, weights.attn_norm_bias);
    ggml_tensor* const attention_input =
        weights.attn_norm_2 == nullptr ? input : ops_.norm(x, weights.attn_norm_2, weights.attn_norm_2_bias);
    ggml_tensor* attended =
        h_.attends(il) ? attention.build(attention_input, il) : delta_net.build(attention_input, il);
    if (il == h_.n_layer - 1) {
        if (shape_.n_outputs == 0) return nullptr;
        if (graph_.out_ids != nullptr) {
            attended = ggml_get_rows(ctx_, attended, graph_.out_ids);
            x = ggml_get_rows(ctx_, x, graph_.out_ids);
            input = h_.block.parallel ? ggml_get_rows(ctx_, input, graph_.out_ids) : input;
        }
    }
    if (h_.block.parallel) {
        ggml_tensor* const ffn_input =
            weights.ffn_norm == nullptr ? input : ops_.norm(x, weights.ffn_norm, weights.ffn_norm_bias);
        x = added(added(x, attended, weights.attn_post_norm), fed(ffn_input, x, weights), weights.ffn_post_norm);
        return rescaled(x, weights);
    }
    x = added(x, attended, weights.attn_post_norm);
    ggml_tensor* const ffn_input = normed(x, weights.ffn_norm, weights.ffn_norm_bias);
    return rescaled(added(x, fed(ffn_input, x, weights), weights.ffn_post_norm), weights);
}

// Hidden states to logits, or to the states behind the last norm.
ggml_tensor* Builder::output(ggml_tensor* x) const {
    x = ops_.norm(x, model_.output_norm(), model_.output_norm_bias());
    if (shape_.result == Result::states) return x;
    x = ops_.scaled(ops_.linear(x, model_.output(), model_.output_bias()), h_.block.logit_scale);
    const float cap = h_.block.logit_softcap;
    return cap == 0.0F ? x : ggml_scale(ctx_, ggml_tanh(ctx_, ggml_scale(ctx_, x, 1.0F / cap)), cap);
}

void Builder::build() {
    ggml_tensor* x = begin();
    const bool ends = end_layer() == h_.n_layer;
    if (ends && shape_.n_outputs > 0 && shape_.n_outputs < shape_.n_tokens) {
        graph_.out_ids = input(GGML_TYPE_I32, shape_.n_outputs, 1, "out_ids");
    }
    if (!shape_.fused) add_reference_inputs();
    AttentionBranch attention(from_, ops_, graph_);
    DeltaNetBranch delta_net(from_, ops_, graph_);
    for (int il = first_layer(); il < end_layer(); il++) {
        x = layer(attention, delta_net, x, il);
        if (x == nullptr) return;
    }
    ggml_tensor*& result = ends ? graph_.result : graph_.hidden_out;
    result = ends ? output(x) : x;
    ggml_set_output(result);
    ggml_build_forward_expand(graph_.nodes, result);
}

}  // namespace

std::unique_ptr<Graph> build_graph(const Model& model, KvCache& cache, const Ropes& ropes,
                                   const GraphConstants& constants, const StateTensors* states, const BatchSlots& batch,
                                   const GraphShape& shape, const ExactRows* exact) {
    const HParams& h = model.hparams();
    auto graph = std::make_unique<Graph>();
    // the reference expression spends up to ~20 nodes a head, latents of unequal ranks four a group
    size_t n_nodes = static_cast<size_t>(h.n_layer) * (max_nodes_per_layer + static_cast<size_t>(ffn_nodes(h)) +
                                                       (shape.fused ? 0 : 64 * static_cast<size_t>(h.n_head))) +
                     64;
    for (const LayerCacheSpec& layer : model.cache_spec().layers) {
        n_nodes += 4 * (layer.k.ranks.size() + layer.v.ranks.size());
    }
    graph->context = tensor_context(ggml_tensor_overhead() * n_nodes * 2 + ggml_graph_overhead_custom(n_nodes, false));
    graph->nodes = ggml_new_graph_custom(graph->context.get(), n_nodes, false);
    graph->attention.resize(static_cast<size_t>(h.n_layer));
    if (!shape.fused && cache.placement().eviction() != nullptr) graph->evicting.resize(static_cast<size_t>(h.n_layer));
    graph->writers.resize(exact != nullptr ? static_cast<size_t>(h.n_layer) : 0);
    const GraphSources from{model, cache, ropes, constants, states, batch, shape, exact};
    Builder(from, *graph).build();
    return graph;
}

}  // namespace lkv
