#include "graph/ggml_entry.h"

#include <algorithm>
#include <array>

#include "cache/evict/gumbel.h"

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
                   in_blocks(layout)) {
            std::copy_n(row, layout.width, batch.k_staged + int64_t{token} * layout.width);
        } else {
            write_row(layout, row, node.cache->rows().k_row(to.region, node.row_layer, to.slot));
        }
    }
}

// A problem of the node as it is in this run.
LatentAttnParams run_params(const AttentionNode& node, bool full, const ggml_tensor* q, float* out) {
    LatentAttnParams params = full ? *node.full : *node.latents;
    params.q = static_cast<const float*>(q->data);
    params.n_tokens = static_cast<int32_t>(q->ne[2]);
    params.q_pos = node.batch->pos.data();
    params.q_seq = node.batch->seq.data();
    params.out = out;
    node.list_regions(full, params);
    return params;
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
        const LatentAttnParams params = run_params(node, full, dst->src[source++], nullptr);
        latent_attn_partial(params, full ? node.full_plan : node.latents_plan,
                            const_cast<float*>(scratch_of(node, full, dst)), ith, nth);
    }
}

void run_combine(ggml_tensor* dst, int ith, int nth, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    const ggml_tensor* const partial = dst->src[0];
    auto* const out = static_cast<float*>(dst->data);
    if (node.full && node.latents) {
        const LatentAttnParams full = run_params(node, true, dst->src[1], out);
        const LatentAttnParams latents = run_params(node, false, dst->src[2], out);
        return latent_attn_combine(
            std::array{PartialAttn{full, node.full_plan, scratch_of(node, true, partial)},
                       PartialAttn{latents, node.latents_plan, scratch_of(node, false, partial)}},
            ith, nth);
    }
    const bool full = node.full.has_value();
    const LatentAttnParams params = run_params(node, full, dst->src[1], out);
    latent_attn_combine(
        std::array{PartialAttn{params, full ? node.full_plan : node.latents_plan, scratch_of(node, full, partial)}},
        ith, nth);
}

// Both problems of the node, as they are in this run; queries lead dst's sources.
int mass_problems(const AttentionNode& node, const ggml_tensor* dst, std::array<LatentAttnParams, 2>& problems) {
    int n = 0;
    for (const bool full : {true, false}) {
        if (full ? node.full : node.latents) {
            problems[static_cast<size_t>(n)] = run_params(node, full, dst->src[n], nullptr);
            n++;
        }
    }
    return n;
}

void run_mass(ggml_tensor* dst, int ith, int nth, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    std::array<LatentAttnParams, 2> problems;
    const int n = mass_problems(node, dst, problems);
    const Eviction& eviction = *node.cache->placement().eviction();
    const AttnMassParams params{std::span(problems).first(static_cast<size_t>(n)), eviction.weights().data(),
                                eviction.policy().has_noise, node.layer};
    auto* const mass = static_cast<float*>(dst->data);
    float* const scratch = mass + int64_t{problems[0].n_kv} * node.mass_plan.n_slots;
    attn_mass(params, node.mass_plan, scratch, mass, ith, nth);
}

void run_store_masses(ggml_tensor* dst, int ith, int, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    if (ith > 0) return;
    KvCache& cache = *node.cache;
    int n_slots = 0;
    for (int r = 0; r < cache.placement().n_regions(); r++) n_slots += cache.placement().cells(r, node.row_layer).end();
    const auto* const masses = static_cast<const float*>(dst->src[0]->data);
    int first = 0;
    for (int r = 0; r < cache.placement().n_regions(); r++) {
        const int n = cache.placement().cells(r, node.row_layer).end();
        float* const to = cache.masses(r, node.row_layer);
        for (int i = 0; to != nullptr && i < n; i++) {
            for (int row = 0; row < node.mass_rows; row++) to[i] += masses[int64_t{row} * n_slots + first + i];
        }
        first += n;
    }
}

void run_noise(ggml_tensor* dst, int ith, int nth, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    const int64_t n_tokens = dst->ne[1];
    for (int64_t i = ith; i < n_tokens * dst->ne[2]; i += nth) {
        auto* const row =
            reinterpret_cast<float*>(static_cast<char*>(dst->data) + i * static_cast<int64_t>(dst->nb[1]));
        std::fill_n(row, dst->ne[0], 0.0F);
        const int32_t pos = node.batch->pos[static_cast<size_t>(i % n_tokens)];
        const uint64_t seed = noise_seed(node.layer, static_cast<int>(i / n_tokens), pos);
        int64_t at = 0;
        for (int r = 0; r < node.cache->placement().n_regions(); r++) {
            const Cells& cells = node.cache->placement().cells(r, node.row_layer);
            for (int slot = 0; slot < cells.end(); slot++, at++) {
                if (cells.used(slot)) row[at] = gumbel(seed, cells.pos(slot));
            }
        }
    }
}

template <bool full, bool value_side>
void run_read(ggml_tensor* dst, int ith, int nth, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    int64_t out = 0;
    for (int r = 0; r < node.cache->placement().n_regions(); r++) {
        if (node.cache->rows().is_full(r, node.row_layer) != full) continue;
        const RowLayout& layout = value_side ? node.cache->rows().v_layout(r, node.row_layer)
                                             : node.cache->rows().k_layout(r, node.row_layer);
        const Cells& cells = node.cache->placement().cells(r, node.row_layer);
        for (int slot = 0; slot < cells.end(); slot++, out++) {
            if (out % nth != ith) {
                continue;
            }
            auto* const row =
                reinterpret_cast<float*>(static_cast<char*>(dst->data) + out * static_cast<int64_t>(dst->nb[1]));
            const uint8_t* const bytes = value_side ? node.cache->rows().v_row(r, node.row_layer, 0)
                                                    : node.cache->rows().k_row(r, node.row_layer, 0);
            if (cells.used(slot)) {
                read_slot(layout, bytes, slot, row);
            } else {
                std::fill(row, row + layout.width, 0.0F);
            }
        }
    }
    // a layer that evicts may have fewer slots in use than another
    for (; out < dst->ne[1]; out++) {
        if (out % nth == ith) std::fill_n(static_cast<float*>(dst->data) + out * dst->ne[0], dst->ne[0], 0.0F);
    }
}

}  // namespace

void gpu_store_node(ggml_tensor*, int, int, void*) { GGML_ABORT("[gpu] expected this node on the GPU's executor"); }
void gpu_attend_node(ggml_tensor*, int, int, void*) { GGML_ABORT("[gpu] expected this node on the GPU's executor"); }
void gpu_mass_node(ggml_tensor*, int, int, void*) { GGML_ABORT("[gpu] expected this node on the GPU's executor"); }

void AttentionNode::list_regions(bool full_rows, LatentAttnParams& p) const {
    p.n_regions = 0;
    for (int r = 0; r < cache->placement().n_regions(); r++) {
        if (cache->rows().is_full(r, row_layer) == full_rows) p.regions[p.n_regions++] = cache->view(r, row_layer);
    }
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

ggml_tensor* attn_mass(ggml_context* ctx, AttentionNode& node, const Queries& q, ggml_tensor* stored, int n_threads) {
    std::vector<LatentAttnParams> problems;
    std::vector<ggml_tensor*> args;
    for (const bool full : {true, false}) {
        const std::optional<LatentAttnParams>& params = full ? node.full : node.latents;
        if (!params) continue;
        args.push_back(full ? q.full : q.latents);
        problems.push_back(*params);
        problems.back().n_tokens = static_cast<int32_t>(args.back()->ne[2]);
    }
    if (node.on_gpu) {
        args.push_back(stored);
        return ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, args.data(), static_cast<int>(args.size()), gpu_mass_node,
                              GGML_N_TASKS_MAX, &node);
    }
    int most_slots = 0;
    for (int r = 0; r < node.cache->placement().n_regions(); r++) {
        most_slots += static_cast<int>(whole_tiles(node.cache->placement().cells(r, node.row_layer).capacity()));
    }
    node.mass_plan = attn_mass_plan({problems, nullptr, false, node.layer}, most_slots, n_threads);
    node.mass_rows = problems.front().n_kv;
    args.push_back(stored);
    const int64_t floats =
        int64_t{node.mass_rows} * node.mass_plan.n_slots + static_cast<int64_t>(node.mass_plan.scratch_floats);
    return ggml_custom_4d(ctx, GGML_TYPE_F32, floats, 1, 1, 1, args.data(), static_cast<int>(args.size()), run_mass,
                          GGML_N_TASKS_MAX, &node);
}

ggml_tensor* store_masses(ggml_context* ctx, AttentionNode& node, ggml_tensor* masses) {
    return ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, &masses, 1, run_store_masses, GGML_N_TASKS_MAX, &node);
}

ggml_tensor* mass_noise(ggml_context* ctx, AttentionNode& node, ggml_tensor* stored, int n_slots, int n_tokens,
                        int n_head) {
    return ggml_custom_4d(ctx, GGML_TYPE_F32, n_slots, n_tokens, n_head, 1, &stored, 1, run_noise, GGML_N_TASKS_MAX,
                          &node);
}

const ggml_tensor* last_queries(const ggml_tensor* attention) {
    const ggml_tensor* const stored = attention->src[1];
    const auto n_stored = std::find(stored->src, stored->src + GGML_MAX_SRC, nullptr) - stored->src;
    const ggml_tensor* const last = attention->src[2 + n_stored];
    return last != nullptr ? last : attention->src[0];
}

ggml_tensor* read_rows(ggml_context* ctx, AttentionNode& node, ggml_tensor* stored, bool full, bool value_side,
                       int n_slots) {
    const int r = full ? 0 : node.cache->placement().middle();
    const int width =
        (value_side ? node.cache->rows().v_layout(r, node.row_layer) : node.cache->rows().k_layout(r, node.row_layer))
            .width;
    const auto read = full ? (value_side ? run_read<true, true> : run_read<true, false>)
                           : (value_side ? run_read<false, true> : run_read<false, false>);
    return ggml_custom_4d(ctx, GGML_TYPE_F32, width, n_slots, 1, 1, &stored, 1, read, GGML_N_TASKS_MAX, &node);
}

}  // namespace lkv
