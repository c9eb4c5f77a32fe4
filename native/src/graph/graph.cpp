#include "graph/graph.h"

#include <cmath>

#include "graph/attention_branch.h"
#include "graph/ffn.h"
#include "graph/recurrent/branch.h"
#include "graph/weight_factors.h"

namespace lkv {
namespace {

constexpr size_t max_nodes_per_layer = 88;

// What mixes tokens, by layer.
struct Branches {
    AttentionBranch attention;
    std::unique_ptr<RecurrentBranch> recurrent;
};

class Builder {
public:
    Builder(const GraphSources& from, Graph& graph)
        : from_(from),
          model_(from.model),
          h_(from.model.hparams()),
          shape_(from.shape),
          graph_(graph),
          ctx_(graph.context.get()),
          ops_(ctx_, h_, from.shape.concurrent, from.shape.recorded) {}

    void build();

private:
    int first_layer() const { return shape_.first_layer; }
    int end_layer() const { return shape_.end_layer < 0 ? h_.n_layer : shape_.end_layer; }
    bool has_rope() const;
    bool has_recurrence() const;
    ggml_tensor* input(ggml_type type, int64_t ne0, int64_t ne1, const char* name) const;
    ggml_tensor* begin();
    ggml_tensor* embedded();
    // What tokens bring to a layer, [n_embd_layer, n_tokens], and how it is added after the FFN.
    void make_token_parts(ggml_tensor* embedded);
    ggml_tensor* with_token_part(ggml_tensor* x, const LayerWeights& layer, int il) const;
    void add_reference_inputs();
    // A branch's input x, normed; without a weight x itself.
    ggml_tensor* normed(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias) const {
        return weight == nullptr ? x : ops_.norm(x, weight, bias);
    }
    ggml_tensor* fed(ggml_tensor* x, ggml_tensor* hidden, const LayerWeights& layer, int il) {
        return ffn(ctx_, graph_.nodes, h_, layer, il, x, hidden);
    }
    ggml_tensor* added(ggml_tensor* x, ggml_tensor* branch, ggml_tensor* post_norm) const;
    ggml_tensor* after_ffn(ggml_tensor* x, const LayerWeights& layer, int il) {
        ggml_tensor* const input = normed(x, layer.ffn_norm, layer.ffn_norm_bias);
        return added(x, fed(input, x, layer, il), layer.ffn_post_norm);
    }
    ggml_tensor* finished(ggml_tensor* x, const LayerWeights& layer, int il) const {
        x = with_token_part(x, layer, il);
        return layer.output_scale == nullptr ? x : ggml_mul(ctx_, x, layer.output_scale);
    }
    ggml_tensor* layer(Branches& branches, ggml_tensor* x, int il);
    // Whether only rows of wanted tokens leave the layer.
    bool narrows(int il) const { return il == h_.n_layer - 1 && !shape_.all_states; }
    ggml_tensor* joined(ggml_tensor* token) const;
    ggml_tensor* output(ggml_tensor* x);

    const GraphSources& from_;
    const Model& model_;
    const HParams& h_;
    const GraphShape& shape_;
    Graph& graph_;
    ggml_context* ctx_;
    LayerOps ops_;
    ggml_tensor* embedded_ = nullptr;     // [n_embd, n_tokens], once made
    ggml_tensor* token_parts_ = nullptr;  // [n_embd_layer, n_tokens, n_layer]
};

ggml_tensor* Builder::input(ggml_type type, int64_t ne0, int64_t ne1, const char* name) const {
    ggml_tensor* const t = ggml_new_tensor_2d(ctx_, type, ne0, ne1);
    ggml_set_input(t);
    ggml_set_name(t, name);
    return t;
}

// Whether a layer of this graph rotates its queries and keys by their positions.
bool Builder::has_rope() const {
    for (int il = first_layer(); il < end_layer(); il++) {
        if (h_.attends(il) && from_.ropes.of(il).rotates()) return true;
    }
    return false;
}

bool Builder::has_recurrence() const {
    for (int il = first_layer(); il < end_layer(); il++) {
        if (h_.recurs(il)) return true;
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
    if (h_.temperature_scale > 0.0F) graph_.temperatures = input(GGML_TYPE_F32, n_tokens, 1, "temperatures");
    if (h_.n_embd_layer > 0) make_token_parts(embedded());
    if (has_recurrence()) {
        graph_.states_from = input(GGML_TYPE_I32, shape_.n_seqs, 1, "states_from");
        graph_.states_to = input(GGML_TYPE_I64, int64_t{shape_.n_seqs} * shape_.n_states, 1, "states_to");
    }
    if (!embeds) {
        graph_.hidden_in = input(GGML_TYPE_F32, h_.n_embd, n_tokens, "hidden");
        return graph_.hidden_in;
    }
    ggml_tensor* const x = embedded();
    if (h_.reads_states) return joined(x);
    return learned ? ggml_add(ctx_, x, ggml_get_rows(ctx_, model_.position_embd(), graph_.positions)) : x;
}

// A token and the hidden state of the one before it, both normed, as what a layer reads that guesses.
ggml_tensor* Builder::joined(ggml_tensor* token) const {
    graph_.hidden_in = input(GGML_TYPE_F32, h_.n_embd, shape_.n_tokens, "hidden");
    const MtpWeights& mtp = model_.mtp();
    ggml_tensor* const both = ggml_concat(ctx_, ops_.norm(token, mtp.token_norm, nullptr),
                                          ops_.norm(graph_.hidden_in, mtp.state_norm, nullptr), 0);
    return ops_.linear(both, mtp.input, nullptr);
}

// [n_embd, n_tokens]
ggml_tensor* Builder::embedded() {
    const int64_t n_tokens = shape_.n_tokens;
    if (embedded_ != nullptr) return embedded_;
    ggml_tensor* x = nullptr;
    if (model_.on_gpu()) {
        // one row of the table, of any quantized type: 16 KiB a token to copy instead of a second table on the GPU
        x = graph_.embeddings = input(GGML_TYPE_F32, h_.n_embd, n_tokens, "embeddings");
    } else {
        graph_.tokens = input(GGML_TYPE_I32, n_tokens, 1, "tokens");
        x = ggml_get_rows(ctx_, model_.token_embd(), graph_.tokens);
    }
    if (h_.block.embedding_norm) x = ops_.norm(x, nullptr, nullptr);
    embedded_ = ops_.scaled(x, h_.block.embedding_scale);
    return embedded_;
}

void Builder::make_token_parts(ggml_tensor* embedded) {
    const int64_t n_tokens = shape_.n_tokens;
    const int64_t width = h_.n_embd_layer;
    graph_.layer_embeddings = input(GGML_TYPE_F32, width * h_.n_layer, n_tokens, "layer_embeddings");
    const auto root = [](int64_t n) { return std::sqrt(static_cast<float>(n)); };
    ggml_tensor* const own =
        ggml_reshape_3d(ctx_, ggml_scale(ctx_, graph_.layer_embeddings, root(width)), width, h_.n_layer, n_tokens);
    ggml_tensor* made = ggml_scale(ctx_, ggml_mul_mat(ctx_, model_.layer_proj(), embedded), 1.0F / root(h_.n_embd));
    made = ops_.norm(ggml_reshape_3d(ctx_, made, width, h_.n_layer, n_tokens), model_.layer_proj_norm(), nullptr);
    made = ggml_scale(ctx_, ggml_add(ctx_, made, own), 1.0F / root(2));
    token_parts_ = ggml_cont(ctx_, ggml_permute(ctx_, made, 0, 2, 1, 3));
}

ggml_tensor* Builder::with_token_part(ggml_tensor* x, const LayerWeights& layer, int il) const {
    if (layer.token_gate == nullptr) return x;
    ggml_tensor* part = ggml_view_2d(ctx_, token_parts_, token_parts_->ne[0], token_parts_->ne[1], token_parts_->nb[1],
                                     static_cast<size_t>(il) * token_parts_->nb[2]);
    if (narrows(il) && graph_.out_ids != nullptr) part = ggml_get_rows(ctx_, part, graph_.out_ids);
    ggml_tensor* const gate = activated(ctx_, h_.block.activation, ggml_mul_mat(ctx_, layer.token_gate, x));
    ggml_tensor* const y = ggml_mul_mat(ctx_, layer.token_proj, ggml_mul(ctx_, gate, part));
    return ggml_add(ctx_, x, ops_.norm(y, layer.token_norm, nullptr));
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
    if (post_norm != nullptr) branch = ops_.post_norm(branch, post_norm);
    return ggml_add(ctx_, x, ops_.scaled(branch, h_.block.residual_scale));
}

// The hidden state after a layer; null after the last one where only its rows are wanted.
ggml_tensor* Builder::layer(Branches& branches, ggml_tensor* x, int il) {
    const LayerWeights& weights = model_.layers()[static_cast<size_t>(il)];
    const bool is_last = narrows(il);
    if (h_.mixer(il) == Mixer::none) {
        if (is_last && shape_.n_outputs == 0) return nullptr;
        if (is_last && graph_.out_ids != nullptr) x = ggml_get_rows(ctx_, x, graph_.out_ids);
        return finished(after_ffn(x, weights, il), weights, il);
    }
    ggml_build_forward_expand(graph_.nodes, x);
    ggml_tensor* input = normed(x, weights.attn_norm, weights.attn_norm_bias);
    ggml_tensor* const attention_input =
        weights.attn_norm_2 == nullptr ? input : ops_.norm(x, weights.attn_norm_2, weights.attn_norm_2_bias);
    ggml_tensor* attended =
        h_.recurs(il) ? branches.recurrent->build(attention_input, il) : branches.attention.build(attention_input, il);
    if (is_last) {
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
        x = added(added(x, attended, weights.attn_post_norm), fed(ffn_input, x, weights, il), weights.ffn_post_norm);
        return finished(x, weights, il);
    }
    x = added(x, attended, weights.attn_post_norm);
    return finished(h_.feeds(il) ? after_ffn(x, weights, il) : x, weights, il);
}

// Hidden states to logits, or to the states after the last norm.
ggml_tensor* Builder::output(ggml_tensor* x) {
    x = ops_.norm(x, model_.output_norm(), model_.output_norm_bias());
    if (shape_.all_states) {
        graph_.states = x;
        ggml_set_output(x);
        ggml_build_forward_expand(graph_.nodes, x);
        if (shape_.n_outputs == 0) return nullptr;
        if (graph_.out_ids != nullptr) x = ggml_get_rows(ctx_, x, graph_.out_ids);
    }
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
    Branches branches{{from_, ops_, graph_}, recurrent_branch(from_, ops_, graph_)};
    for (int il = first_layer(); il < end_layer(); il++) {
        x = layer(branches, x, il);
        if (x == nullptr) return;
    }
    ggml_tensor*& result = ends ? graph_.result : graph_.hidden_out;
    result = ends ? output(x) : x;
    if (result == nullptr) return;
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
    const WeightFactors& factors = model.weight_factors();
    n_nodes += factor_nodes(factors);
    const size_t n_graphs = factors.empty() ? 1 : 2;
    graph->context =
        tensor_context(ggml_tensor_overhead() * n_nodes * 2 + n_graphs * ggml_graph_overhead_custom(n_nodes, false));
    graph->nodes = ggml_new_graph_custom(graph->context.get(), n_nodes, false);
    graph->attention.resize(static_cast<size_t>(h.n_layer));
    if (!shape.fused && cache.placement().eviction() != nullptr) graph->evicting.resize(static_cast<size_t>(h.n_layer));
    graph->writers.resize(exact != nullptr ? static_cast<size_t>(h.n_layer) : 0);
    const GraphSources from{model, cache, ropes, constants, states, batch, shape, exact};
    Builder(from, *graph).build();
    if (!factors.empty()) {
        graph->nodes = with_factors(graph->context.get(), graph->nodes, factors, n_nodes, graph->roles,
                                    {&graph->result, &graph->states, &graph->hidden_out});
    }
    return graph;
}

}  // namespace lkv
