#include "model/graph.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/error.h"
#include "base/log.h"
#include "model/encode.h"
#include "model/ffn.h"

namespace lkv {
namespace {

constexpr size_t max_nodes_per_layer = 64;

// A layer's projections, [head_dim, heads, n_tokens]: the queries and, where they are at hand, K and V. K is whole: after bias, norm and
// RoPE, or before all three where rows hold it so (raw).
struct Heads {
    ggml_tensor* q = nullptr;
    ggml_tensor* k = nullptr;
    ggml_tensor* v = nullptr;
};

bool raw_keys(const LayerCacheSpec& spec) { return spec.k_path == KPath::rebuild || spec.k_path == KPath::absorbed; }

class Builder {
public:
    Builder(const Model& model, KvCache& cache, const Ropes& ropes, const GraphConstants& constants,
            const BatchSlots& batch, const GraphShape& shape, const ExactRows* exact, Graph& graph)
        : model_(model),
          h_(model.hparams()),
          cache_(cache),
          ropes_(ropes),
          constants_(constants),
          batch_(batch),
          shape_(shape),
          exact_(exact),
          graph_(graph),
          ctx_(graph.context.get()) {}

    void build();

private:
    ggml_tensor* input(ggml_type type, int64_t ne0, int64_t ne1, const char* name);
    ggml_tensor* norm(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias);
    ggml_tensor* linear(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias);
    ggml_tensor* rope(ggml_tensor* x, int il);
    ggml_tensor* rope_factors(int il) const {
        return constants_.rope_factors[ropes_.of_layer[static_cast<size_t>(il)]];
    }
    ggml_tensor* rotate(ggml_tensor* x, ggml_tensor* hadamard);
    ggml_tensor* clamp(ggml_tensor* x);
    ggml_tensor* held(ggml_tensor* x);
    ggml_tensor* project(ggml_tensor* q, const LayerWeights& layer);
    ggml_tensor* encode(ggml_tensor* x, ggml_tensor* e, const TensorSpec& spec);
    Heads heads(ggml_tensor* x, int il);
    ggml_tensor* normed_whole(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias);
    ggml_tensor* finished(ggml_tensor* k, int il);
    BatchRows full_rows(const Heads& heads, const LayerCacheSpec& spec);
    BatchRows exact_rows(const BatchRows& latents, const Heads& heads, int il);
    BatchRows latent_rows(ggml_tensor* x, const Heads& heads, const LayerWeights& layer, const LayerCacheSpec& spec);
    int first_layer() const { return shape_.first_layer; }
    int end_layer() const { return shape_.end_layer < 0 ? h_.n_layer : shape_.end_layer; }
    bool turns() const;
    ggml_tensor* begin();
    ggml_tensor* attention(ggml_tensor* x, int il);
    ggml_tensor* fed(ggml_tensor* x, const LayerWeights& layer) { return ffn(ctx_, graph_.nodes, h_, layer, x); }
    ggml_tensor* scaled(ggml_tensor* x, float by);
    ggml_tensor* added(ggml_tensor* x, ggml_tensor* branch, ggml_tensor* post_norm);
    ggml_tensor* output(ggml_tensor* x);
    bool expands_keys(int il) const;
    ReferenceInputs& reference_of(int il) {
        if (exact_ == nullptr && cache_.placement().evicts(il)) return graph_.evicting[static_cast<size_t>(il)];
        return exact_ == nullptr && cache_.placement().in_ring(il) ? graph_.ring_reference : graph_.reference;
    }
    void describe(LatentAttnParams& p, int il) const;
    AttentionNode& attention_node(int il, const Queries& q, bool split);

    const Model& model_;
    const HParams& h_;
    KvCache& cache_;
    const Ropes& ropes_;
    const GraphConstants& constants_;
    const BatchSlots& batch_;
    const GraphShape& shape_;
    const ExactRows* exact_;
    Graph& graph_;
    ggml_context* ctx_;
};

ggml_tensor* Builder::input(ggml_type type, int64_t ne0, int64_t ne1, const char* name) {
    ggml_tensor* const t = ggml_new_tensor_2d(ctx_, type, ne0, ne1);
    ggml_set_input(t);
    ggml_set_name(t, name);
    return t;
}

ggml_tensor* Builder::norm(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias) {
    x = h_.block.norm == Norm::rms ? ggml_rms_norm(ctx_, x, h_.norm_eps) : ggml_norm(ctx_, x, h_.norm_eps);
    x = ggml_mul(ctx_, x, weight);
    return bias == nullptr ? x : ggml_add(ctx_, x, bias);
}

ggml_tensor* Builder::linear(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias) {
    x = ggml_mul_mat(ctx_, weight, x);
    return bias == nullptr ? x : ggml_add(ctx_, x, bias);
}

ggml_tensor* Builder::scaled(ggml_tensor* x, float by) { return by == 1.0F ? x : ggml_scale(ctx_, x, by); }

// x [head_dim, heads, n_tokens]
ggml_tensor* Builder::rope(ggml_tensor* x, int il) {
    const Rope& rope = ropes_.of(il);
    if (!rope.turns()) return x;
    // held: a GPU's products with E_q and E_k turn their vectors themselves
    held(x);
    const int mode = h_.block.rope_pairing == RopePairing::neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL;
    return ggml_rope_ext(ctx_, x, graph_.positions, rope_factors(il), h_.n_rot, mode, 0, rope.base, 1.0F, 0.0F,
                         rope.mscale, 32.0F, 1.0F);
}

ggml_tensor* Builder::rotate(ggml_tensor* x, ggml_tensor* hadamard) {
    if (hadamard == nullptr) {
        return x;
    }
    const int64_t block = hadamard->ne[0];
    ggml_tensor* const flat =
        ggml_reshape_2d(ctx_, ggml_is_contiguous(x) ? x : ggml_cont(ctx_, x), block, ggml_nelements(x) / block);
    ggml_tensor* const y = ggml_mul_mat(ctx_, hadamard, flat);
    ggml_mul_mat_set_hint(y, GGML_HINT_SRC0_IS_HADAMARD);
    return ggml_reshape_3d(ctx_, y, x->ne[0], x->ne[1], x->ne[2]);
}

ggml_tensor* Builder::clamp(ggml_tensor* x) {
    return h_.clamp_kqv > 0.0F ? ggml_clamp(ctx_, x, -h_.clamp_kqv, h_.clamp_kqv) : x;
}

// What leads to K, V and Q keeps its memory: a GPU computes them side by side, and none may be written over another.
ggml_tensor* Builder::held(ggml_tensor* x) {
    if (shape_.on_gpu && shape_.n_tokens <= small_batch) {
        ggml_set_output(x->view_src != nullptr ? x->view_src : x);
    }
    return x;
}

// q' = E_q[j(h)] q: [head_dim, n_head, n_tokens] -> [rank_k max, n_head, n_tokens]
ggml_tensor* Builder::project(ggml_tensor* q, const LayerWeights& layer) {
    // heads of one KV head share its E_q
    return held(swapped(ctx_, held(ggml_mul_mat(ctx_, layer.attn_q_e, held(swapped(ctx_, q))))));
}

// z_g = E[g] x_g: [head_dim, n_kv, n_tokens] -> [Σ rank, n_tokens]
ggml_tensor* Builder::encode(ggml_tensor* x, ggml_tensor* e, const TensorSpec& spec) {
    return lkv::encode(ctx_, e, x, spec, [this](ggml_tensor* t) { return held(t); });
}

// Whether the queries stay in their heads' space and E_q makes keys of the latents: for many queries that is less work than
// products with latents wider than a head. (A GPU expands a part of the cache for all of them.)
bool Builder::expands_keys(int il) const {
    const KPath path = model_.cache_spec().layers[static_cast<size_t>(il)].k_path;
    return path != KPath::rebuild && !model_.layers()[static_cast<size_t>(il)].k_b.empty() && shape_.on_gpu &&
           shape_.fused && exact_ == nullptr && shape_.n_tokens >= least_expanded_tokens &&
           !in_blocks(cache_.rows().k_layout(cache_.placement().middle(), il));
}

// What every problem of a layer has.
void Builder::describe(LatentAttnParams& p, int il) const {
    p.n_head = h_.n_head;
    p.n_kv = h_.n_kv;
    p.head_dim = h_.head_dim;
    p.k_group = p.v_group = 1;
    p.scale = h_.block.attention_scale;
    p.softcap = h_.block.attention_softcap;
    p.window = h_.block.layers[static_cast<size_t>(il)].window;
    const LayerWeights& layer = model_.layers()[static_cast<size_t>(il)];
    p.sinks = layer.sinks.empty() ? nullptr : layer.sinks.data();
    p.sink_values = layer.sink_values.empty() ? nullptr : layer.sink_values.data();
    p.alibi_slopes = constants_.alibi_slopes.empty() ? nullptr : constants_.alibi_slopes.data();
}

// split: exact windows hold full rows, and are a problem of their own.
AttentionNode& Builder::attention_node(int il, const Queries& q, bool split) {
    const LayerWeights& layer = model_.layers()[static_cast<size_t>(il)];
    const LayerCacheSpec& spec = exact_ != nullptr ? exact_->spec : model_.cache_spec().layers[static_cast<size_t>(il)];
    AttentionNode& node = graph_.attention[static_cast<size_t>(il)];
    node.cache = exact_ != nullptr ? exact_->cache : &cache_;
    node.batch = exact_ != nullptr ? &exact_->batch : &batch_;
    node.layer = il;
    node.row_layer = exact_ != nullptr ? 0 : il;
    node.on_gpu = shape_.on_gpu;

    const auto rebuild = [&](LatentAttnParams& p) {
        p.k_bias = layer.k_bias.empty() ? nullptr : layer.k_bias.data();
        p.k_norm = layer.k_norm.empty() ? nullptr : layer.k_norm.data();
        p.k_norm_eps = h_.norm_eps;
        const Rope& rope = ropes_.of(il);
        p.rope_freqs = rope.turns() ? rope.freqs.data() : nullptr;
        p.rope_mscale = rope.mscale;
        p.n_rot = h_.n_rot;
        p.rope_neox = h_.block.rope_pairing == RopePairing::neox;
    };
    if (split) {
        LatentAttnParams& p = node.full.emplace();
        describe(p, il);
        p.q_width = h_.head_dim;
        if (spec.k_path == KPath::rebuild) {
            p.k_raw = true;
            p.k_rank_max = h_.head_dim;
            rebuild(p);
        }
        node.list_regions(true, p);
    }
    if (q.latents == nullptr) {
        return node;
    }
    LatentAttnParams& p = node.latents.emplace();
    describe(p, il);
    p.q_width = static_cast<int32_t>(q.latents->ne[0]);
    p.k_group = spec.k.group;
    p.v_group = spec.v.group;
    if (spec.k_path == KPath::rebuild || expands_keys(il)) {
        p.k_b = layer.k_b.data();
        p.k_rank_max = spec.k.rank_max();
    }
    if (spec.k_path == KPath::rebuild) {
        rebuild(p);
    }
    if (spec.v_path == VPath::latent) {
        p.v_b = layer.v_b.data();
        p.v_rank_max = spec.v.rank_max();
    }
    node.list_regions(false, p);
    return node;
}

Heads Builder::heads(ggml_tensor* x, int il) {
    const LayerWeights& layer = model_.layers()[static_cast<size_t>(il)];
    const LayerCacheSpec& spec = model_.cache_spec().layers[static_cast<size_t>(il)];
    const int64_t n_tokens = x->ne[1];
    const int64_t hd = h_.head_dim;
    const bool raw = raw_keys(spec);
    const bool whole = layer.attn_k_norm_whole != nullptr;
    ggml_tensor* const raw_bias = whole ? nullptr : layer.attn_k_e_bias;  // else it is added behind the norm
    Heads of;
    if (layer.attn_qkv != nullptr) {
        ggml_tensor* const qkv = held(clamp(linear(x, layer.attn_qkv, layer.attn_qkv_bias)));
        const size_t f = sizeof(float);
        const auto cut = [&](int64_t heads, int64_t first) {
            return held(ggml_cont(ctx_, ggml_view_3d(ctx_, qkv, hd, heads, n_tokens, static_cast<size_t>(hd) * f,
                                                     qkv->nb[1], static_cast<size_t>(first * hd) * f)));
        };
        of = {cut(h_.n_head, 0), cut(h_.n_kv, h_.n_head), cut(h_.n_kv, h_.n_head + h_.n_kv)};
    } else {
        const auto project = [&](ggml_tensor* weight, ggml_tensor* bias, int64_t n) {
            return weight == nullptr ? nullptr
                                     : ggml_reshape_3d(ctx_, held(clamp(linear(x, weight, bias))), hd, n, n_tokens);
        };
        of.q = project(layer.attn_q, layer.attn_q_bias, h_.n_head);
        of.k = project(layer.attn_k, raw ? raw_bias : layer.attn_k_bias, h_.n_kv);
        // a latent's bias is added once, to the output
        of.v = project(layer.attn_v, spec.v_path == VPath::latent ? layer.attn_v_e_bias : layer.attn_v_bias, h_.n_kv);
    }
    if (layer.attn_q_norm_whole != nullptr) {
        of.q = normed_whole(of.q, layer.attn_q_norm_whole, nullptr);
    }
    if (of.k != nullptr && whole) {
        of.k = normed_whole(of.k, layer.attn_k_norm_whole, raw ? layer.attn_k_e_bias : nullptr);
    }
    if (layer.attn_q_norm != nullptr) {
        of.q = norm(of.q, layer.attn_q_norm, nullptr);
    }
    of.q = held(rope(of.q, il));
    if (of.k != nullptr && !raw) {
        of.k = finished(of.k, il);
    }
    return of;
}

// x [head_dim, heads, n_tokens], normed over all heads of a token together.
ggml_tensor* Builder::normed_whole(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias) {
    ggml_tensor* const rows = ggml_reshape_2d(ctx_, x, x->ne[0] * x->ne[1], x->ne[2]);
    return ggml_reshape_3d(ctx_, held(norm(rows, weight, bias)), x->ne[0], x->ne[1], x->ne[2]);
}

// Keys as their queries meet them: normed and turned.
ggml_tensor* Builder::finished(ggml_tensor* k, int il) {
    const LayerWeights& layer = model_.layers()[static_cast<size_t>(il)];
    if (layer.attn_k_norm != nullptr) {
        k = norm(k, layer.attn_k_norm, nullptr);
    }
    return held(rope(k, il));
}

// [.., n_tokens] as one row a token.
ggml_tensor* as_rows(ggml_context* ctx, ggml_tensor* x, int64_t n_tokens) {
    x = ggml_is_contiguous(x) ? x : ggml_cont(ctx, x);
    return ggml_reshape_2d(ctx, x, ggml_nelements(x) / n_tokens, n_tokens);
}

// Rows of an exact window.
BatchRows Builder::full_rows(const Heads& heads, const LayerCacheSpec& spec) {
    const auto rotated = [&](bool full, ggml_tensor* x, ggml_tensor* hadamard) {
        return as_rows(ctx_, full ? held(rotate(x, hadamard)) : x, x->ne[2]);
    };
    return {rotated(spec.k_path == KPath::full, heads.k, constants_.hadamard_k),
            rotated(spec.v_path == VPath::full, heads.v, constants_.hadamard_v)};
}

// What a lazily prefilled prompt attends to: whole K and V where they are at hand, else latents that lose nothing.
BatchRows Builder::exact_rows(const BatchRows& latents, const Heads& heads, int il) {
    const LayerWeights& layer = model_.layers()[static_cast<size_t>(il)];
    const LayerCacheSpec& spec = model_.cache_spec().layers[static_cast<size_t>(il)];
    BatchRows rows = latents;
    if (spec.k.encoded) {
        ggml_tensor* k = heads.k;
        if (spec.k_path == KPath::rebuild) {
            if (layer.attn_k_bias != nullptr) {
                k = ggml_add(ctx_, k, ggml_reshape_2d(ctx_, layer.attn_k_bias, h_.head_dim, h_.n_kv));
            }
            k = finished(k, il);
        }
        rows.k = as_rows(ctx_, k, k->ne[2]);
    }
    if (spec.v.encoded) {
        rows.v = as_rows(ctx_, heads.v, heads.v->ne[2]);
    }
    return rows;
}

// Rows of the middle: latents, or full K or V where its path is `full`.
BatchRows Builder::latent_rows(ggml_tensor* x, const Heads& heads, const LayerWeights& layer,
                               const LayerCacheSpec& spec) {
    const auto encoded = [&](ggml_tensor* whole, ggml_tensor* e, ggml_tensor* a, ggml_tensor* bias,
                             const TensorSpec& side) {
        return side.encoded ? encode(whole, e, side) : held(linear(x, a, bias));
    };
    ggml_tensor* const k = spec.k_path == KPath::full
                               ? held(rotate(heads.k, constants_.hadamard_k))
                               : encoded(heads.k, layer.attn_k_e, layer.attn_k_a, layer.attn_k_a_bias, spec.k);
    ggml_tensor* const v = spec.v_path == VPath::full
                               ? held(rotate(heads.v, constants_.hadamard_v))
                               : encoded(heads.v, layer.attn_v_e, layer.attn_v_a, layer.attn_v_a_bias, spec.v);
    return {as_rows(ctx_, k, x->ne[1]), as_rows(ctx_, v, x->ne[1])};
}

// x: the normed input [n_embd, n_tokens]; returns the attention branch before the residual.
ggml_tensor* Builder::attention(ggml_tensor* x, int il) {
    const LayerWeights& layer = model_.layers()[static_cast<size_t>(il)];
    const LayerCacheSpec& spec = model_.cache_spec().layers[static_cast<size_t>(il)];
    const int64_t n_tokens = x->ne[1];
    const int64_t hd = h_.head_dim;
    const bool split = cache_.rows().is_full(0, il);
    held(x);
    const Heads of = heads(x, il);
    const bool moved = spec.k_path == KPath::rotated || spec.k_path == KPath::absorbed;
    Queries q{nullptr, nullptr};
    std::optional<BatchRows> full;
    std::optional<BatchRows> latents;
    ggml_tensor* const whole_q = spec.k_path == KPath::full ? held(rotate(of.q, constants_.hadamard_k)) : of.q;
    if (split) {
        full = full_rows(of, spec);
    }
    if (!split || shape_.to_middle || exact_ != nullptr) {
        latents = latent_rows(x, of, layer, spec);
    }

    ggml_tensor* stored = nullptr;
    AttentionNode* node = nullptr;
    if (exact_ != nullptr) {
        AttentionNode& writer = graph_.writers[static_cast<size_t>(il)];
        writer.cache = &cache_;
        writer.batch = &batch_;
        writer.layer = writer.row_layer = il;
        writer.on_gpu = shape_.on_gpu;
        ggml_build_forward_expand(graph_.nodes, store_rows(ctx_, writer, full, latents));
        q.latents = exact_->spec.k_path == KPath::full || !moved ? whole_q : project(whole_q, layer);
        node = &attention_node(il, q, false);
        stored = store_rows(ctx_, *node, std::nullopt, exact_rows(*latents, of, il));
    } else {
        if (split) {
            q.full = whole_q;
        }
        if (!split || (cache_.placement().in_ring(il) ? shape_.ring : shape_.latents)) {
            q.latents = moved && !expands_keys(il) ? project(whole_q, layer) : whole_q;
        }
        node = &attention_node(il, q, split);
        stored = store_rows(ctx_, *node, full, latents);
    }
    ggml_build_forward_expand(graph_.nodes, stored);  // rows are written even where no output follows
    ggml_tensor* out = nullptr;
    ggml_tensor* masses = nullptr;
    const bool evicts = exact_ == nullptr && cache_.placement().evicts(il);
    if (shape_.fused) {
        out = latent_attn(ctx_, *node, q, stored, shape_.n_threads);
        if (evicts) masses = attn_mass(ctx_, *node, q, shape_.on_gpu ? out : stored, shape_.n_threads);
    } else {
        out = latent_attn_reference(ctx_, *node, model_, ropes_.of(il), rope_factors(il), reference_of(il), q, stored,
                                    evicts ? &masses : nullptr);
    }
    if (evicts) {
        ggml_build_forward_expand(graph_.nodes, shape_.on_gpu ? masses : store_masses(ctx_, *node, masses));
    }
    if (spec.v_path == VPath::full) {
        out = rotate(out, constants_.hadamard_v);  // H is its own inverse
    } else if (layer.attn_v_bias != nullptr) {
        out = ggml_reshape_4d(ctx_, out, hd, h_.n_head / h_.n_kv, h_.n_kv, n_tokens);
        out = ggml_add(ctx_, out, ggml_reshape_3d(ctx_, layer.attn_v_bias, hd, 1, h_.n_kv));
    }
    out = ggml_reshape_2d(ctx_, out, hd * h_.n_head, n_tokens);
    return linear(out, layer.attn_output, layer.attn_output_bias);
}

// The hidden state x and what a branch adds to it.
ggml_tensor* Builder::added(ggml_tensor* x, ggml_tensor* branch, ggml_tensor* post_norm) {
    if (post_norm != nullptr) branch = norm(branch, post_norm, nullptr);
    return ggml_add(ctx_, x, scaled(branch, h_.block.residual_scale));
}

// Hidden states to logits.
ggml_tensor* Builder::output(ggml_tensor* x) {
    x = norm(x, model_.output_norm(), model_.output_norm_bias());
    x = scaled(linear(x, model_.output(), model_.output_bias()), h_.block.logit_scale);
    const float cap = h_.block.logit_softcap;
    return cap == 0.0F ? x : ggml_scale(ctx_, ggml_tanh(ctx_, ggml_scale(ctx_, x, 1.0F / cap)), cap);
}

// Whether a layer of this graph turns its queries and keys.
bool Builder::turns() const {
    for (int il = first_layer(); il < end_layer(); il++) {
        if (ropes_.of(il).turns()) return true;
    }
    return false;
}

// The inputs of the graph; returns what its first layer reads.
ggml_tensor* Builder::begin() {
    const int64_t n_tokens = shape_.n_tokens;
    const bool embeds = shape_.first_layer == 0;
    const bool learned = embeds && h_.block.position == Position::learned;
    if (learned || turns()) {
        graph_.positions = input(GGML_TYPE_I32, n_tokens, 1, "positions");
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
    x = scaled(x, h_.block.embedding_scale);
    return learned ? ggml_add(ctx_, x, ggml_get_rows(ctx_, model_.position_embd(), graph_.positions)) : x;
}

void Builder::build() {
    const int64_t n_tokens = shape_.n_tokens;
    ggml_tensor* x = begin();
    if (end_layer() == h_.n_layer && shape_.n_outputs > 0 && shape_.n_outputs < shape_.n_tokens) {
        graph_.out_ids = input(GGML_TYPE_I32, shape_.n_outputs, 1, "out_ids");
    }
    if (!shape_.fused) {
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
            ReferenceInputs& inputs = reference_of(il);
            ggml_tensor*& mask = inputs.masks[h_.block.layers[static_cast<size_t>(il)].window];
            if (mask == nullptr) mask = input(GGML_TYPE_F32, inputs.n_slots, n_tokens, "mask");
            if (inputs.slot_pos == nullptr) inputs.slot_pos = input(GGML_TYPE_I32, inputs.n_slots, 1, "slot_pos");
        }
    }

    for (int il = first_layer(); il < end_layer(); il++) {
        const LayerWeights& layer = model_.layers()[static_cast<size_t>(il)];
        ggml_tensor* normed = layer.attn_norm == nullptr ? x : norm(x, layer.attn_norm, layer.attn_norm_bias);
        ggml_tensor* const attn_in =
            layer.attn_norm_2 == nullptr ? normed : norm(x, layer.attn_norm_2, layer.attn_norm_2_bias);
        ggml_tensor* attn_out = attention(attn_in, il);
        if (il == h_.n_layer - 1) {
            if (shape_.n_outputs == 0) {
                return;  // every layer's rows are written; nothing else is wanted
            }
            if (graph_.out_ids != nullptr) {
                attn_out = ggml_get_rows(ctx_, attn_out, graph_.out_ids);
                x = ggml_get_rows(ctx_, x, graph_.out_ids);
                normed = h_.block.parallel ? ggml_get_rows(ctx_, normed, graph_.out_ids) : normed;
            }
        }
        if (h_.block.parallel) {
            ggml_tensor* const ffn_in =
                layer.ffn_norm == nullptr ? normed : norm(x, layer.ffn_norm, layer.ffn_norm_bias);
            x = added(added(x, attn_out, layer.attn_post_norm), fed(ffn_in, layer), layer.ffn_post_norm);
        } else {
            x = added(x, attn_out, layer.attn_post_norm);
            ggml_tensor* const ffn_in = layer.ffn_norm == nullptr ? x : norm(x, layer.ffn_norm, layer.ffn_norm_bias);
            x = added(x, fed(ffn_in, layer), layer.ffn_post_norm);
        }
    }
    if (end_layer() < h_.n_layer) {
        graph_.hidden_out = x;
        ggml_set_output(x);
        ggml_build_forward_expand(graph_.nodes, x);
        return;
    }
    graph_.logits = output(x);
    ggml_set_output(graph_.logits);
    ggml_build_forward_expand(graph_.nodes, graph_.logits);
}

// Orthonormal symmetric Hadamard matrix (Sylvester): H[i][j] = (−1)^popcount(i & j) / sqrt(n).
std::vector<float> hadamard(int n) {
    std::vector<float> h(static_cast<size_t>(n) * static_cast<size_t>(n));
    const float scale = 1.0F / std::sqrt(static_cast<float>(n));
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < n; j++) {
            h[static_cast<size_t>(i) * static_cast<size_t>(n) + static_cast<size_t>(j)] =
                std::popcount(static_cast<unsigned>(i & j)) % 2 == 0 ? scale : -scale;
        }
    }
    return h;
}

// ALiBi (Press et al. 2022) with the usual rule for head counts that are not a power of two.
std::vector<float> alibi_slopes(int n_head, float max_bias) {
    const int n_power = static_cast<int>(std::bit_floor(static_cast<unsigned>(n_head)));
    const double m0 = std::pow(2.0, -max_bias / n_power);
    const double m1 = std::pow(2.0, -max_bias / 2.0 / n_power);
    std::vector<float> slopes;
    for (int head = 0; head < n_head; head++) {
        slopes.push_back(
            static_cast<float>(head < n_power ? std::pow(m0, head + 1) : std::pow(m1, 2 * (head - n_power) + 1)));
    }
    return slopes;
}

}  // namespace

int hadamard_block(const HParams& h, bool value_side) {
    // K: the largest power of two that divides head_dim; V: at most 64, where smaller measured better in llama.cpp (PR 21038)
    const int largest = h.head_dim & -h.head_dim;
    return value_side ? std::min(64, largest) : largest;
}

GraphConstants make_graph_constants(const HParams& h, const Ropes& ropes, bool rotate_k, bool rotate_v,
                                    ggml_backend_buffer_type_t memory) {
    GraphConstants constants;
    constants.context = tensor_context(ggml_tensor_overhead() * (4 + ropes.tables.size()));
    ggml_context* const ctx = constants.context.get();
    const int block_k = hadamard_block(h, false);
    const int block_v = hadamard_block(h, true);
    for (const Rope& rope : ropes.tables) {
        const auto n = static_cast<int64_t>(rope.freqs.size());
        constants.rope_factors.push_back(n == 0 ? nullptr : ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n));
    }
    if (rotate_k) {
        constants.hadamard_k = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, block_k, block_k);
    }
    if (rotate_v) {
        constants.hadamard_v = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, block_v, block_v);
    }
    constants.buffer.reset(quietly([&] { return ggml_backend_alloc_ctx_tensors_from_buft(ctx, memory); }));
    if (constants.buffer == nullptr && ggml_get_first_tensor(ctx) != nullptr) {
        fail("memory", "expected room for the graph's constants; got none in ", ggml_backend_buft_name(memory));
    }
    const auto set = [](ggml_tensor* t, const std::vector<float>& values) {
        if (t != nullptr) {
            ggml_backend_tensor_set(t, values.data(), 0, values.size() * sizeof(float));
        }
    };
    for (size_t i = 0; i < ropes.tables.size(); i++) set(constants.rope_factors[i], ropes.tables[i].ggml_factors);
    set(constants.hadamard_k, hadamard(block_k));
    set(constants.hadamard_v, hadamard(block_v));
    if (h.max_alibi_bias > 0.0F) {
        constants.alibi_slopes = alibi_slopes(h.n_head, h.max_alibi_bias);
    }
    return constants;
}

std::unique_ptr<Graph> build_graph(const Model& model, KvCache& cache, const Ropes& ropes,
                                   const GraphConstants& constants, const BatchSlots& batch, const GraphShape& shape,
                                   const ExactRows* exact) {
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
    Builder(model, cache, ropes, constants, batch, shape, exact, *graph).build();
    return graph;
}

}  // namespace lkv
