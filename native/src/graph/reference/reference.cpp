#include "graph/reference/reference.h"

#include <cmath>
#include <limits>
#include <vector>

#include "ggml-backend.h"

namespace lkv {
namespace {

// Rows of one group, [rank, n_slots], out of [Σ rank, n_slots].
ggml_tensor* group_rows(ggml_context* ctx, ggml_tensor* rows, const GroupLayout& group) {
    return ggml_view_2d(ctx, rows, group.width, rows->ne[1], rows->nb[1],
                        static_cast<size_t>(group.column) * ggml_element_size(rows));
}

// B of KV head j, [rank, head_dim], out of [rank max, n_kv·head_dim].
ggml_tensor* head_factor(ggml_context* ctx, ggml_tensor* b, int j, int head_dim, int rank) {
    return ggml_view_2d(ctx, b, rank, head_dim, b->nb[1],
                        static_cast<size_t>(j) * static_cast<size_t>(head_dim) * b->nb[1]);
}

// One problem's rows, f32: full ones of the exact windows, or those of every other region.
struct ProblemRows {
    const LatentAttnParams& p;
    ggml_tensor* q;
    ggml_tensor* k;
    ggml_tensor* v;
    RowLayout k_layout;
    RowLayout v_layout;
    int first;  // slot, counted over all regions
    int n;
    bool of_value;  // keys are made of V's rows, which are in k too
};

// k of KV head j as its queries see it: [q_width, n].
ggml_tensor* key_rows(ggml_context* ctx, const Model& model, const LayerWeights& layer, const Rope& rope,
                      ggml_tensor* rope_factors, const ReferenceInputs& inputs, const ProblemRows& rows, int j) {
    const HParams& h = model.hparams();
    const bool of_value = rows.of_value;
    ggml_tensor* const bias = of_value ? layer.attn_v_bias : layer.attn_k_bias;
    const GroupLayout& group = rows.k_layout.groups[j / rows.p.k_group];
    ggml_tensor* k = ggml_cont(ctx, group_rows(ctx, rows.k, group));
    if (!rows.p.rebuilds()) {
        return k;
    }
    if (!rows.p.k_raw) {
        k = ggml_mul_mat(ctx,
                         ggml_cont(ctx, head_factor(ctx, of_value ? layer.attn_v_b : layer.attn_k_b, j, rows.p.head_dim,
                                                    group.width)),
                         k);
    }
    if (bias != nullptr) {
        k = ggml_add(ctx, k,
                     ggml_view_1d(ctx, bias, rows.p.head_dim,
                                  static_cast<size_t>(j) * static_cast<size_t>(rows.p.head_dim) * sizeof(float)));
    }
    if (layer.attn_k_norm != nullptr) {
        k = ggml_rms_norm(ctx, k, h.norm_eps);
        if (!h.block.norm_after_rope) k = ggml_mul(ctx, k, layer.attn_k_norm);
    }
    if (rope.rotates()) {
        ggml_tensor* const positions =
            ggml_view_1d(ctx, inputs.slot_pos, rows.n, static_cast<size_t>(rows.first) * sizeof(int32_t));
        k = ggml_reshape_3d(ctx, k, rows.p.head_dim, 1, rows.n);
        k = ggml_rope_ext(ctx, k, positions, rope_factors, rows.p.n_rot,
                          h.block.rope_pairing == RopePairing::neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL, 0,
                          rope.base, 1.0F, 0.0F, rope.mscale, 32.0F, 1.0F);
        k = ggml_reshape_2d(ctx, k, rows.p.head_dim, rows.n);
    }
    return k;
}

// What a problem's slots add to a head's output, of weights p [n_slots, n_tokens]: [head_dim, n_tokens].
ggml_tensor* weighed_values(ggml_context* ctx, const LayerWeights& layer, const ProblemRows& rows, ggml_tensor* p,
                            int j) {
    const GroupLayout& group = rows.v_layout.groups[j / rows.p.v_group];
    ggml_tensor* const v = ggml_cont(ctx, ggml_transpose(ctx, group_rows(ctx, rows.v, group)));  // [n, rank]
    ggml_tensor* const own = ggml_cont(
        ctx, ggml_view_2d(ctx, p, rows.n, p->ne[1], p->nb[1], static_cast<size_t>(rows.first) * sizeof(float)));
    ggml_tensor* const o = ggml_mul_mat(ctx, v, own);  // [rank or head_dim, n_tokens]
    if (rows.p.v_b == nullptr) {
        return o;
    }
    return ggml_mul_mat(ctx, ggml_cont(ctx, head_factor(ctx, layer.attn_v_b, j, rows.p.head_dim, group.width)), o);
}

// A head's masses: scores [n_slots, n_tokens] scaled and capped, mask with ALiBi, noise or null. Returns [n_slots, 1].
ggml_tensor* head_masses(ggml_context* ctx, const ReferenceInputs& inputs, ggml_tensor* scores, ggml_tensor* mask,
                         ggml_tensor* noise, ggml_tensor* sink) {
    const int64_t n_slots = scores->ne[0];
    ggml_tensor* x = ggml_add(ctx, scores, mask);
    if (noise != nullptr) x = ggml_add(ctx, x, noise);
    x = ggml_mul(ctx, x, inputs.mass_cold);
    if (sink != nullptr) x = ggml_concat(ctx, x, ggml_mul(ctx, inputs.mass_cold, sink), 0);
    x = ggml_soft_max(ctx, x);
    ggml_tensor* const slots = ggml_view_2d(ctx, x, n_slots, x->ne[1], x->nb[1], 0);
    ggml_tensor* const masses = ggml_mul_mat(ctx, ggml_cont(ctx, ggml_transpose(ctx, slots)), inputs.mass_weight);
    ggml_mul_mat_set_prec(masses, GGML_PREC_F32);
    return masses;
}

// Attention of one layer, head after head.
class Expression {
public:
    Expression(ggml_context* ctx, AttentionNode& node, const Model& model, const Rope& rope, ggml_tensor* rope_factors,
               const ReferenceInputs& inputs, const Queries& q, ggml_tensor* stored)
        : ctx_(ctx),
          node_(node),
          model_(model),
          rope_(rope),
          rope_factors_(rope_factors),
          inputs_(inputs),
          layer_(model.layers()[static_cast<size_t>(node.layer)]),
          heads_(model.hparams().heads_of(node.layer)),
          problems_(problem_rows(q, stored)),
          p_(problems_.front().p),
          n_tokens_(problems_.front().q->ne[2]) {}

    // noise: of masses, or null. masses: null where the layer does not evict. Returns [head_dim, n_head, n_tokens].
    ggml_tensor* build(ggml_tensor* noise, ggml_tensor** masses) {
        ggml_tensor* out = nullptr;
        for (int head = 0, j = -1; head < heads_.n_head; head++) {
            if (const int own = head / (heads_.n_head / heads_.n_kv); own != j) rebuild_keys(j = own);
            ggml_tensor* const scores = capped(head_scores(head));
            ggml_tensor* const mask = head_mask(scores->ne[0], head);
            ggml_tensor* const sink = head_sink(head);
            const float scale = p_.softcap > 0.0F ? 1.0F : p_.scale;
            if (masses != nullptr) {
                ggml_tensor* const mass = head_masses(ctx_, inputs_, ggml_scale(ctx_, scores, scale), mask,
                                                      head_noise(noise, scores->ne[0], head), sink);
                *masses = *masses == nullptr ? mass : ggml_add(ctx_, *masses, mass);
            }
            ggml_tensor* const weights = ggml_soft_max_ext(ctx_, scores, mask, scale, 0.0F);
            if (sink != nullptr) ggml_soft_max_add_sinks(weights, sink);
            ggml_tensor* const o = ggml_reshape_3d(ctx_, head_output(weights, j), p_.head_dim, 1, n_tokens_);
            out = out == nullptr ? o : ggml_concat(ctx_, out, o, 1);
        }
        return out;
    }
    int64_t n_tokens() const { return n_tokens_; }

private:
    // The full rows of exact windows and those of the other regions, where there are some.
    std::vector<ProblemRows> problem_rows(const Queries& q, ggml_tensor* stored) const {
        std::vector<ProblemRows> problems;
        for (const bool full : {true, false}) {
            const std::optional<LatentAttnParams>& params = full ? node_.full : node_.latents;
            const int first = full || !node_.full ? 0 : inputs_.n_exact;
            const int n = full ? inputs_.n_exact : inputs_.n_slots - first;
            if (!params || n == 0) continue;
            const int r = full ? 0 : node_.cache->placement().middle();
            const Rows& rows = node_.cache->rows();
            const bool of_value = rows.key_of_value(node_.row_layer);
            problems.push_back({*params, full ? q.full : q.latents, read_rows(ctx_, node_, stored, full, of_value, n),
                                read_rows(ctx_, node_, stored, full, true, n),
                                rows.layout(r, node_.row_layer, of_value), rows.values_layout(r, node_.row_layer),
                                first, n, of_value});
        }
        return problems;
    }

    // Rebuilds K of KV head j for each problem.
    void rebuild_keys(int j) {
        keys_.clear();
        for (const ProblemRows& rows : problems_) {
            keys_.push_back(key_rows(ctx_, model_, layer_, rope_, rope_factors_, inputs_, rows, j));
        }
    }

    // [n_slots, n_tokens]
    ggml_tensor* head_scores(int head) const {
        ggml_tensor* scores = nullptr;
        for (size_t i = 0; i < problems_.size(); i++) {
            ggml_tensor* const all = problems_[i].q;
            ggml_tensor* const q = ggml_cont(ctx_, ggml_view_2d(ctx_, all, keys_[i]->ne[0], n_tokens_, all->nb[2],
                                                                static_cast<size_t>(head) * all->nb[1]));
            ggml_tensor* const own = ggml_mul_mat(ctx_, keys_[i], q);
            ggml_mul_mat_set_prec(own, GGML_PREC_F32);
            scores = scores == nullptr ? own : ggml_concat(ctx_, scores, own, 0);
        }
        return scores;
    }

    // If the model caps scores: scores, scaled and capped.
    ggml_tensor* capped(ggml_tensor* scores) const {
        if (p_.softcap <= 0.0F) return scores;
        ggml_tensor* const bent = ggml_tanh(ctx_, ggml_scale(ctx_, scores, p_.scale / p_.softcap));
        return ggml_scale(ctx_, bent, p_.softcap);
    }

    ggml_tensor* head_mask(int64_t n_slots, int head) const {
        ggml_tensor* mask = inputs_.masks.at(p_.window);
        if (n_slots != inputs_.n_slots) {  // no slot but these is in use
            mask = ggml_cont(ctx_, ggml_view_2d(ctx_, mask, n_slots, n_tokens_, mask->nb[1], 0));
        }
        // slope · (−distance); −inf stays −inf as slopes are positive
        return p_.alibi_slopes == nullptr ? mask : ggml_scale(ctx_, mask, p_.alibi_slopes[head]);
    }

    ggml_tensor* head_sink(int head) const {
        ggml_tensor* const sinks = layer_.attn_sinks;
        return sinks == nullptr ? nullptr : ggml_view_1d(ctx_, sinks, 1, static_cast<size_t>(head) * sizeof(float));
    }

    ggml_tensor* head_noise(ggml_tensor* noise, int64_t n_slots, int head) const {
        if (noise == nullptr) return nullptr;
        return ggml_cont(ctx_, ggml_view_2d(ctx_, noise, n_slots, n_tokens_, noise->nb[1],
                                            static_cast<size_t>(head) * noise->nb[2]));
    }

    // weights: of all slots, [n_slots, n_tokens]; j: the KV head. Returns [head_dim, n_tokens].
    ggml_tensor* head_output(ggml_tensor* weights, int j) const {
        ggml_tensor* o = nullptr;
        for (const ProblemRows& rows : problems_) {
            ggml_tensor* const own = weighed_values(ctx_, layer_, rows, weights, j);
            o = o == nullptr ? own : ggml_add(ctx_, o, own);
        }
        if (p_.sink_values == nullptr) return o;
        // less the bias times the sink's weight, which is 1 - that of all slots
        ggml_tensor* const weight = ggml_scale_bias(ctx_, ggml_sum_rows(ctx_, weights), 1.0F, -1.0F);
        const auto head_dim = static_cast<size_t>(p_.head_dim);
        ggml_tensor* const bias =
            ggml_view_1d(ctx_, layer_.attn_v_bias, p_.head_dim, static_cast<size_t>(j) * head_dim * sizeof(float));
        return ggml_add(ctx_, o, ggml_mul(ctx_, ggml_repeat(ctx_, bias, o), weight));
    }

    ggml_context* ctx_;
    AttentionNode& node_;
    const Model& model_;
    const Rope& rope_;
    ggml_tensor* rope_factors_;
    const ReferenceInputs& inputs_;
    const LayerWeights& layer_;
    const HeadShape& heads_;
    const std::vector<ProblemRows> problems_;
    const LatentAttnParams& p_;  // of any problem, in what they have in common
    const int64_t n_tokens_;
    std::vector<ggml_tensor*> keys_;  // of the present KV head
};

}  // namespace

ggml_tensor* latent_attn_reference(ggml_context* ctx, AttentionNode& node, const Model& model, const Rope& rope,
                                   ggml_tensor* rope_factors, const ReferenceInputs& inputs, const Queries& q,
                                   ggml_tensor* stored, ggml_tensor** masses) {
    Expression expression(ctx, node, model, rope, rope_factors, inputs, q, stored);
    ggml_tensor* noise = nullptr;
    if (masses != nullptr && node.cache->placement().eviction()->policy().has_noise) {
        noise = mass_noise(ctx, node, stored, inputs.n_slots, static_cast<int>(expression.n_tokens()),
                           model.hparams().heads_of(node.layer).n_head);
    }
    return expression.build(noise, masses);
}

void fill_reference_inputs(const KvCache& cache, int layer, const BatchSlots& batch, const HParams& hparams,
                           const ReferenceInputs& inputs) {
    const auto set = [](ggml_tensor* tensor, const void* data, size_t bytes) {
        if (tensor != nullptr && tensor->buffer != nullptr) ggml_backend_tensor_set(tensor, data, 0, bytes);
    };
    std::vector<int32_t> slot_pos;
    std::vector<uint64_t> slot_seq;  // 0: free
    for (int r = 0; r < cache.placement().n_regions(); r++) {
        const Cells& cells = cache.placement().cells(r, layer);
        for (int slot = 0; slot < cells.end(); slot++) {
            slot_pos.push_back(cells.used(slot) ? cells.pos(slot) : 0);
            slot_seq.push_back(cells.seq(slot));
        }
    }
    // a layer that evicts may have fewer slots in use than another
    slot_pos.resize(static_cast<size_t>(inputs.n_slots), 0);
    slot_seq.resize(static_cast<size_t>(inputs.n_slots), 0);
    for (const auto& [window, tensor] : inputs.masks) {
        std::vector<float> mask;
        for (size_t t = 0; t < batch.pos.size(); t++) {
            for (size_t slot = 0; slot < slot_pos.size(); slot++) {
                const int32_t distance = batch.pos[t] - slot_pos[slot];
                const bool visible =
                    ((slot_seq[slot] >> batch.seq[t]) & 1) != 0 && distance >= 0 && (window == 0 || distance < window);
                const float bias = hparams.max_alibi_bias > 0.0F ? -static_cast<float>(distance) : 0.0F;
                mask.push_back(visible ? bias : -std::numeric_limits<float>::infinity());
            }
        }
        set(tensor, mask.data(), mask.size() * sizeof(float));
    }
    set(inputs.slot_pos, slot_pos.data(), slot_pos.size() * sizeof(int32_t));
    if (inputs.mass_weight == nullptr) return;
    std::vector<float> weight;
    std::vector<float> cold;
    for (const QueryWeight& query : cache.placement().eviction()->weights()) {
        weight.push_back(query.weight);
        cold.push_back(1.0F / query.temperature);
    }
    set(inputs.mass_weight, weight.data(), weight.size() * sizeof(float));
    set(inputs.mass_cold, cold.data(), cold.size() * sizeof(float));
}

}  // namespace lkv
