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

}  // namespace

ggml_tensor* latent_attn_reference(ggml_context* ctx, AttentionNode& node, const Model& model, const Rope& rope,
                                   ggml_tensor* rope_factors, const ReferenceInputs& inputs, const Queries& q,
                                   ggml_tensor* stored, ggml_tensor** masses) {
    const HParams& h = model.hparams();
    const LayerWeights& layer = model.layers()[static_cast<size_t>(node.layer)];
    const int n_kv = h.heads_of(node.layer).n_kv;
    const int rep = h.heads_of(node.layer).n_head / n_kv;
    std::vector<ProblemRows> problems;
    for (const bool full : {true, false}) {
        const std::optional<LatentAttnParams>& params = full ? node.full : node.latents;
        const int first = full || !node.full ? 0 : inputs.n_exact;
        const int n = full ? inputs.n_exact : inputs.n_slots - first;
        if (!params || n == 0) continue;
        const int r = full ? 0 : node.cache->placement().middle();
        const Rows& rows = node.cache->rows();
        const bool of_value = rows.key_of_value(node.row_layer);
        problems.push_back({*params, full ? q.full : q.latents, read_rows(ctx, node, stored, full, of_value, n),
                            read_rows(ctx, node, stored, full, true, n), rows.layout(r, node.row_layer, of_value),
                            rows.values_layout(r, node.row_layer), first, n, of_value});
    }
    const LatentAttnParams& any = problems.front().p;
    const int64_t head_dim = any.head_dim;
    const int64_t n_tokens = problems.front().q->ne[2];

    ggml_tensor* noise = nullptr;
    if (masses != nullptr && node.cache->placement().eviction()->policy().has_noise) {
        noise =
            mass_noise(ctx, node, stored, inputs.n_slots, static_cast<int>(n_tokens), h.heads_of(node.layer).n_head);
    }
    ggml_tensor* out = nullptr;  // [head_dim, heads so far, n_tokens]
    for (int j = 0; j < n_kv; j++) {
        std::vector<ggml_tensor*> keys;
        for (const ProblemRows& rows : problems) {
            keys.push_back(key_rows(ctx, model, layer, rope, rope_factors, inputs, rows, j));
        }
        for (int r = 0; r < rep; r++) {
            const int head = j * rep + r;
            ggml_tensor* p = nullptr;  // [n_slots, n_tokens]
            for (size_t i = 0; i < problems.size(); i++) {
                ggml_tensor* const all = problems[i].q;
                ggml_tensor* const qh = ggml_cont(ctx, ggml_view_2d(ctx, all, keys[i]->ne[0], n_tokens, all->nb[2],
                                                                    static_cast<size_t>(head) * all->nb[1]));
                ggml_tensor* const scores = ggml_mul_mat(ctx, keys[i], qh);
                ggml_mul_mat_set_prec(scores, GGML_PREC_F32);
                p = p == nullptr ? scores : ggml_concat(ctx, p, scores, 0);
            }
            ggml_tensor* mask = inputs.masks.at(any.window);
            if (p->ne[0] != inputs.n_slots) {  // no slot but these is in use
                mask = ggml_cont(ctx, ggml_view_2d(ctx, mask, p->ne[0], n_tokens, mask->nb[1], 0));
            }
            if (any.alibi_slopes != nullptr) {
                // slope · (−distance); −inf stays −inf as slopes are positive
                mask = ggml_scale(ctx, mask, any.alibi_slopes[head]);
            }
            float scale = any.scale;
            if (any.softcap > 0.0F) {
                p = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, p, scale / any.softcap)), any.softcap);
                scale = 1.0F;
            }
            ggml_tensor* const sink =
                layer.attn_sinks == nullptr
                    ? nullptr
                    : ggml_view_1d(ctx, layer.attn_sinks, 1, static_cast<size_t>(head) * sizeof(float));
            if (masses != nullptr) {
                ggml_tensor* const of_head =
                    noise == nullptr ? nullptr
                                     : ggml_cont(ctx, ggml_view_2d(ctx, noise, p->ne[0], n_tokens, noise->nb[1],
                                                                   static_cast<size_t>(head) * noise->nb[2]));
                ggml_tensor* const mass = head_masses(ctx, inputs, ggml_scale(ctx, p, scale), mask, of_head, sink);
                *masses = *masses == nullptr ? mass : ggml_add(ctx, *masses, mass);
            }
            p = ggml_soft_max_ext(ctx, p, mask, scale, 0.0F);
            if (sink != nullptr) {
                ggml_soft_max_add_sinks(p, sink);
            }
            ggml_tensor* o = nullptr;
            for (const ProblemRows& rows : problems) {
                ggml_tensor* const of_rows = weighed_values(ctx, layer, rows, p, j);
                o = o == nullptr ? of_rows : ggml_add(ctx, o, of_rows);
            }
            if (any.sink_values != nullptr) {
                // less the bias times the sink's weight, which is 1 - that of all slots
                ggml_tensor* const weight = ggml_scale_bias(ctx, ggml_sum_rows(ctx, p), 1.0F, -1.0F);
                ggml_tensor* const bias =
                    ggml_view_1d(ctx, layer.attn_v_bias, head_dim,
                                 static_cast<size_t>(j) * static_cast<size_t>(head_dim) * sizeof(float));
                o = ggml_add(ctx, o, ggml_mul(ctx, ggml_repeat(ctx, bias, o), weight));
            }
            o = ggml_reshape_3d(ctx, o, head_dim, 1, n_tokens);
            out = out == nullptr ? o : ggml_concat(ctx, out, o, 1);
        }
    }
    return out;
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
