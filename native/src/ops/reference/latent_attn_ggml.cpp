#include "ops/reference/latent_attn_ggml.h"

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

// k of KV head j as its queries see it: [q_width, n_slots].
ggml_tensor* key_rows(ggml_context* ctx, const AttentionNode& node, const Model& model, const Rope& rope,
                      const ReferenceInputs& inputs, ggml_tensor* rows, int j) {
    const HParams& h = model.hparams();
    const LayerWeights& layer = model.layers()[static_cast<size_t>(node.layer)];
    const RowLayout& row = node.cache->k_layout(0, node.row_layer);
    const GroupLayout& group = row.groups[j / node.params.k_group];
    ggml_tensor* k = ggml_cont(ctx, group_rows(ctx, rows, group));
    if (node.params.k_b == nullptr) {
        return k;
    }
    k = ggml_mul_mat(ctx, ggml_cont(ctx, head_factor(ctx, layer.attn_k_b, j, h.head_dim, group.width)), k);
    if (layer.attn_k_bias != nullptr) {
        k = ggml_add(ctx, k,
                     ggml_view_1d(ctx, layer.attn_k_bias, h.head_dim,
                                  static_cast<size_t>(j) * static_cast<size_t>(h.head_dim) * sizeof(float)));
    }
    if (layer.attn_k_norm != nullptr) {
        k = ggml_mul(ctx, ggml_rms_norm(ctx, k, h.norm_eps), layer.attn_k_norm);
    }
    if (h.block.position == Position::rope) {
        k = ggml_reshape_3d(ctx, k, h.head_dim, 1, inputs.n_slots);
        k = ggml_rope_ext(ctx, k, inputs.slot_pos, inputs.rope_factors, h.n_rot,
                          h.block.rope_pairing == RopePairing::neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL, 0,
                          rope.base, 1.0F, 0.0F, rope.mscale, 32.0F, 1.0F);
        k = ggml_reshape_2d(ctx, k, h.head_dim, inputs.n_slots);
    }
    return k;
}

}  // namespace

ggml_tensor* latent_attn_reference(ggml_context* ctx, AttentionNode& node, const Model& model, const Rope& rope,
                                   const ReferenceInputs& inputs, ggml_tensor* q, ggml_tensor* stored) {
    const HParams& h = model.hparams();
    const LayerWeights& layer = model.layers()[static_cast<size_t>(node.layer)];
    const int64_t n_tokens = q->ne[2];
    const int rep = h.n_head / h.n_kv;
    ggml_tensor* const k_rows = read_rows(ctx, node, stored, false, inputs.n_slots);
    ggml_tensor* const v_rows = read_rows(ctx, node, stored, true, inputs.n_slots);
    const RowLayout& v_layout = node.cache->v_layout(0, node.row_layer);

    ggml_tensor* out = nullptr;  // [head_dim, heads so far, n_tokens]
    for (int j = 0; j < h.n_kv; j++) {
        ggml_tensor* const k = key_rows(ctx, node, model, rope, inputs, k_rows, j);
        const GroupLayout& v_group = v_layout.groups[j / node.params.v_group];
        ggml_tensor* const v =
            ggml_cont(ctx, ggml_transpose(ctx, group_rows(ctx, v_rows, v_group)));  // [n_slots, rank]
        for (int r = 0; r < rep; r++) {
            const int head = j * rep + r;
            ggml_tensor* const qh = ggml_cont(
                ctx, ggml_view_2d(ctx, q, k->ne[0], n_tokens, q->nb[2], static_cast<size_t>(head) * q->nb[1]));
            ggml_tensor* p = ggml_mul_mat(ctx, k, qh);  // [n_slots, n_tokens]
            ggml_mul_mat_set_prec(p, GGML_PREC_F32);
            ggml_tensor* mask = inputs.mask;
            if (node.params.alibi_slopes != nullptr) {
                // slope · (−distance); −inf stays −inf as slopes are positive
                mask = ggml_scale(ctx, mask, node.params.alibi_slopes[head]);
            }
            p = ggml_soft_max_ext(ctx, p, mask, node.params.scale, 0.0F);
            ggml_tensor* o = ggml_mul_mat(ctx, v, p);  // [rank or head_dim, n_tokens]
            if (layer.attn_v_b != nullptr) {
                o = ggml_mul_mat(ctx, ggml_cont(ctx, head_factor(ctx, layer.attn_v_b, j, h.head_dim, v_group.width)),
                                 o);
            }
            o = ggml_reshape_3d(ctx, o, h.head_dim, 1, n_tokens);
            out = out == nullptr ? o : ggml_concat(ctx, out, o, 1);
        }
    }
    return out;
}

void fill_reference_inputs(const KvCache& cache, const BatchSlots& batch, const HParams& hparams,
                           const ReferenceInputs& inputs) {
    const size_t n_tokens = batch.pos.size();
    std::vector<int32_t> slot_pos;
    std::vector<float> mask(static_cast<size_t>(inputs.n_slots) * n_tokens, -std::numeric_limits<float>::infinity());
    for (int r = 0; r < cache.n_regions(); r++) {
        const Cells& cells = cache.cells(r);
        for (int slot = 0; slot < cells.end(); slot++) {
            const size_t at = slot_pos.size();
            slot_pos.push_back(cells.used(slot) ? cells.pos(slot) : 0);
            for (size_t t = 0; t < n_tokens; t++) {
                const int32_t distance = batch.pos[t] - cells.pos(slot);
                const bool visible = ((cells.seq(slot) >> batch.seq[t]) & 1) != 0 && distance >= 0 &&
                                     (hparams.window == 0 || distance < hparams.window);
                if (visible) {
                    mask[t * static_cast<size_t>(inputs.n_slots) + at] =
                        hparams.max_alibi_bias > 0.0F ? -static_cast<float>(distance) : 0.0F;
                }
            }
        }
    }
    ggml_backend_tensor_set(inputs.mask, mask.data(), 0, mask.size() * sizeof(float));
    if (inputs.slot_pos != nullptr && inputs.slot_pos->buffer != nullptr) {
        ggml_backend_tensor_set(inputs.slot_pos, slot_pos.data(), 0, slot_pos.size() * sizeof(int32_t));
    }
}

}  // namespace lkv
