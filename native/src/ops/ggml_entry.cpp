#include "ops/ggml_entry.h"

#include <algorithm>
#include <array>

namespace lkv {
namespace {

// ggml calls these from its thread pool, through C: they must not throw, and nothing below allocates or fails.

void run_store(ggml_tensor* dst, int ith, int nth, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    const BatchSlots& batch = *node.batch;
    const ggml_tensor* k = dst->src[0];
    const ggml_tensor* v = dst->src[1];
    // K and V rows are separate jobs, so that two threads share even a single token
    const int n_jobs = 2 * static_cast<int>(batch.slots.size());
    for (int job = ith; job < n_jobs; job += nth) {
        const int token = job / 2;
        const SlotRef to = batch.slots[static_cast<size_t>(token)];
        const bool value = job % 2 == 1;
        const ggml_tensor* source = value ? v : k;
        const auto* row =
            reinterpret_cast<const float*>(static_cast<const char*>(source->data) + token * source->nb[1]);
        if (value) {
            write_row(node.cache->v_layout(to.region, node.row_layer), row,
                      node.cache->v_row(to.region, node.row_layer, to.slot));
        } else if (const RowLayout& layout = node.cache->k_layout(to.region, node.row_layer); in_blocks(layout)) {
            std::copy_n(row, layout.width, batch.k_staged + int64_t{token} * layout.width);
        } else {
            write_row(layout, row, node.cache->k_row(to.region, node.row_layer, to.slot));
        }
    }
}

LatentAttnParams run_params(const AttentionNode& node, const ggml_tensor* q, float* out) {
    LatentAttnParams params = node.params;
    params.q = static_cast<const float*>(q->data);
    params.n_tokens = static_cast<int32_t>(q->ne[2]);
    params.q_pos = node.batch->pos.data();
    params.q_seq = node.batch->seq.data();
    params.out = out;
    params.n_regions = node.cache->n_regions();
    for (int r = 0; r < params.n_regions; r++) {
        params.regions[r] = node.cache->view(r, node.row_layer);
    }
    return params;
}

void run_partial(ggml_tensor* dst, int ith, int nth, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    const LatentAttnParams params = run_params(node, dst->src[0], nullptr);
    latent_attn_partial(params, node.plan, static_cast<float*>(dst->data), ith, nth);
}

void run_combine(ggml_tensor* dst, int ith, int nth, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    const LatentAttnParams params = run_params(node, dst->src[1], static_cast<float*>(dst->data));
    latent_attn_combine(params, node.plan, static_cast<const float*>(dst->src[0]->data), ith, nth);
}

template <bool value_side>
void run_read(ggml_tensor* dst, int ith, int nth, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    int64_t out = 0;
    for (int r = 0; r < node.cache->n_regions(); r++) {
        const RowLayout& layout =
            value_side ? node.cache->v_layout(r, node.row_layer) : node.cache->k_layout(r, node.row_layer);
        for (int slot = 0; slot < node.cache->cells(r).end(); slot++, out++) {
            if (out % nth != ith) {
                continue;
            }
            auto* const row =
                reinterpret_cast<float*>(static_cast<char*>(dst->data) + out * static_cast<int64_t>(dst->nb[1]));
            const uint8_t* const bytes =
                value_side ? node.cache->v_row(r, node.row_layer, 0) : node.cache->k_row(r, node.row_layer, 0);
            if (node.cache->cells(r).used(slot)) {
                read_slot(layout, bytes, slot, row);
            } else {
                std::fill(row, row + layout.width, 0.0F);
            }
        }
    }
}

}  // namespace

void gpu_store_node(ggml_tensor*, int, int, void*) { GGML_ABORT("[gpu] expected this node on the GPU's executor"); }
void gpu_attend_node(ggml_tensor*, int, int, void*) { GGML_ABORT("[gpu] expected this node on the GPU's executor"); }

ggml_tensor* store_rows(ggml_context* ctx, AttentionNode& node, ggml_tensor* k, ggml_tensor* v) {
    std::array<ggml_tensor*, 2> args = {k, v};
    return ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, args.data(), args.size(),
                          node.on_gpu ? gpu_store_node : run_store, GGML_N_TASKS_MAX, &node);
}

ggml_tensor* latent_attn(ggml_context* ctx, AttentionNode& node, ggml_tensor* q, ggml_tensor* stored, int n_threads) {
    node.params.n_tokens = static_cast<int32_t>(q->ne[2]);
    if (node.on_gpu) {
        // the rows' sources live until here: they are stored beside what computes the queries
        std::array<ggml_tensor*, 4> args = {q, stored, stored->src[0], stored->src[1]};
        return ggml_custom_4d(ctx, GGML_TYPE_F32, node.params.head_dim, node.params.n_head, q->ne[2], 1, args.data(),
                              args.size(), gpu_attend_node, GGML_N_TASKS_MAX, &node);
    }
    node.plan = latent_attn_plan(node.params, n_threads);
    std::array<ggml_tensor*, 2> partial_args = {q, stored};
    ggml_tensor* const partial =
        ggml_custom_4d(ctx, GGML_TYPE_F32, static_cast<int64_t>(node.plan.scratch_floats), 1, 1, 1, partial_args.data(),
                       partial_args.size(), run_partial, GGML_N_TASKS_MAX, &node);
    std::array<ggml_tensor*, 2> combine_args = {partial, q};
    return ggml_custom_4d(ctx, GGML_TYPE_F32, node.params.head_dim, node.params.n_head, q->ne[2], 1,
                          combine_args.data(), combine_args.size(), run_combine, GGML_N_TASKS_MAX, &node);
}

ggml_tensor* read_rows(ggml_context* ctx, AttentionNode& node, ggml_tensor* stored, bool value_side, int n_slots) {
    const int width =
        (value_side ? node.cache->v_layout(0, node.row_layer) : node.cache->k_layout(0, node.row_layer)).width;
    std::array<ggml_tensor*, 1> args = {stored};
    return ggml_custom_4d(ctx, GGML_TYPE_F32, width, n_slots, 1, 1, args.data(), args.size(),
                          value_side ? run_read<true> : run_read<false>, GGML_N_TASKS_MAX, &node);
}

}  // namespace lkv
