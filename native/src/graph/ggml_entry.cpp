#include "graph/ggml_entry.h"

#include <algorithm>
#include <array>

namespace lkv {
namespace {

// ggml calls these from its thread pool, through C: they must not throw, and nothing below allocates or fails.

void run_store(ggml_tensor* dst, int ith, int nth, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    const BatchSlots& batch = *node.batch;
    // K and V rows are separate jobs, so that two threads share even a single token
    const int n_jobs = 2 * static_cast<int>(batch.slots.size());
    for (int job = ith; job < n_jobs; job += nth) {
        const int token = job / 2;
        const SlotRef to = node.cache->placement().row_of(batch.slots[static_cast<size_t>(token)], node.row_layer);
        const bool value = job % 2 == 1;
        if (to.slot < 0) continue;  // no query of this layer sees the token
        const bool full = node.cache->rows().is_full(to.region, node.row_layer);
        const ggml_tensor* const source = dst->src[(full ? 0 : node.latent_source) + (value ? 1 : 0)];
        const auto* row =
            reinterpret_cast<const float*>(static_cast<const char*>(source->data) + token * source->nb[1]);
        if (value) {
            write_row(node.cache->rows().v_layout(to.region, node.row_layer), row,
                      node.cache->rows().v_row(to.region, node.row_layer, to.slot));
        } else if (const RowLayout& layout = node.cache->rows().k_layout(to.region, node.row_layer);
                   in_token_blocks(layout)) {
            std::copy_n(row, layout.width, batch.k_staged + int64_t{token} * layout.width);
        } else {
            write_row(layout, row, node.cache->rows().k_row(to.region, node.row_layer, to.slot));
        }
    }
}

// Where a problem's scratch lies in what the partial node leaves.
const float* scratch_of(const AttentionNode& node, bool full, const ggml_tensor* partial) {
    const size_t first = full || !node.full ? 0 : node.full_plan.scratch_floats;
    return static_cast<const float*>(partial->data) + first;
}

// dst: scratch of both problems. src: the queries of each.
void run_partial(ggml_tensor* dst, int ith, int nth, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    int source = 0;
    for (const bool full : {true, false}) {
        if (!(full ? node.full : node.latents)) continue;
        const LatentAttnParams params = node.run_params(full, dst->src[source++], nullptr);
        latent_attn_partial(params, full ? node.full_plan : node.latents_plan,
                            const_cast<float*>(scratch_of(node, full, dst)), ith, nth);
    }
}

void run_combine(ggml_tensor* dst, int ith, int nth, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    const ggml_tensor* const partial = dst->src[0];
    auto* const out = static_cast<float*>(dst->data);
    if (node.full && node.latents) {
        const LatentAttnParams full = node.run_params(true, dst->src[1], out);
        const LatentAttnParams latents = node.run_params(false, dst->src[2], out);
        return latent_attn_combine(
            std::array{PartialAttn{full, node.full_plan, scratch_of(node, true, partial)},
                       PartialAttn{latents, node.latents_plan, scratch_of(node, false, partial)}},
            ith, nth);
    }
    const bool full = node.full.has_value();
    const LatentAttnParams params = node.run_params(full, dst->src[1], out);
    latent_attn_combine(
        std::array{PartialAttn{params, full ? node.full_plan : node.latents_plan, scratch_of(node, full, partial)}},
        ith, nth);
}

}  // namespace

void gpu_store_node(ggml_tensor*, int, int, void*) { GGML_ABORT("[gpu] expected this node on the GPU's executor"); }
void gpu_attend_node(ggml_tensor*, int, int, void*) { GGML_ABORT("[gpu] expected this node on the GPU's executor"); }

void AttentionNode::list_regions(bool full_rows, LatentAttnParams& p) const {
    p.n_regions = 0;
    for (int r = 0; r < cache->placement().n_regions(); r++) {
        if (cache->rows().is_full(r, row_layer) == full_rows) p.regions[p.n_regions++] = cache->view(r, row_layer);
    }
}

LatentAttnParams AttentionNode::run_params(bool full_rows, const ggml_tensor* q, float* out) const {
    LatentAttnParams params = full_rows ? *full : *latents;
    params.q = static_cast<const float*>(q->data);
    params.n_tokens = static_cast<int32_t>(q->ne[2]);
    params.q_pos = batch->pos.data();
    params.q_seq = batch->seq.data();
    params.out = out;
    list_regions(full_rows, params);
    return params;
}

ggml_tensor* store_rows(ggml_context* ctx, AttentionNode& node, const std::optional<BatchRows>& full,
                        const std::optional<BatchRows>& latents) {
    std::vector<ggml_tensor*> args;
    if (full) {
        args = {full->k, full->v};
    }
    node.latent_source = static_cast<int>(args.size());
    if (latents) {
        args.insert(args.end(), {latents->k, latents->v});
    }
    return ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, args.data(), static_cast<int>(args.size()),
                          node.on_gpu ? gpu_store_node : run_store, GGML_N_TASKS_MAX, &node);
}

ggml_tensor* latent_attn(ggml_context* ctx, AttentionNode& node, const Queries& q, ggml_tensor* stored, int n_threads) {
    std::vector<ggml_tensor*> queries;
    size_t scratch = 0;
    for (const bool full : {true, false}) {
        std::optional<LatentAttnParams>& params = full ? node.full : node.latents;
        if (!params) continue;
        queries.push_back(full ? q.full : q.latents);
        params->n_tokens = static_cast<int32_t>(queries.back()->ne[2]);
        if (node.on_gpu) continue;
        LatentAttnPlan& plan = full ? node.full_plan : node.latents_plan;
        plan = latent_attn_plan(*params, n_threads);
        scratch += plan.scratch_floats;
    }
    const LatentAttnParams& p = node.full ? *node.full : *node.latents;
    std::vector<ggml_tensor*> args;
    if (node.on_gpu) {
        // the rows' sources live until here: they are stored beside what computes the queries
        args = {queries.front(), stored};
        for (int i = 0; i < GGML_MAX_SRC && stored->src[i] != nullptr; i++) args.push_back(stored->src[i]);
        if (queries.size() > 1) args.push_back(queries.back());
        return ggml_custom_4d(ctx, GGML_TYPE_F32, p.head_dim, p.n_head, p.n_tokens, 1, args.data(),
                              static_cast<int>(args.size()), gpu_attend_node, GGML_N_TASKS_MAX, &node);
    }
    args = queries;
    args.push_back(stored);
    ggml_tensor* const partial = ggml_custom_4d(ctx, GGML_TYPE_F32, static_cast<int64_t>(scratch), 1, 1, 1, args.data(),
                                                static_cast<int>(args.size()), run_partial, GGML_N_TASKS_MAX, &node);
    args = {partial};
    args.insert(args.end(), queries.begin(), queries.end());  // kept until here
    return ggml_custom_4d(ctx, GGML_TYPE_F32, p.head_dim, p.n_head, p.n_tokens, 1, args.data(),
                          static_cast<int>(args.size()), run_combine, GGML_N_TASKS_MAX, &node);
}

const ggml_tensor* last_queries(const ggml_tensor* attention) {
    const ggml_tensor* const stored = attention->src[1];
    const auto n_stored = std::find(stored->src, stored->src + GGML_MAX_SRC, nullptr) - stored->src;
    const ggml_tensor* const last = attention->src[2 + n_stored];
    return last != nullptr ? last : attention->src[0];
}

}  // namespace lkv
