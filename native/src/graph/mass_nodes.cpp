// Nodes of eviction: what a layer's slots gather from a batch's queries, and its sum in the cache.
#include <array>

#include "cache/slots.h"
#include "graph/ggml_entry.h"

namespace lkv {
namespace {

// Both problems of the node, as they are in this run; queries lead dst's sources.
int mass_problems(const AttentionNode& node, const ggml_tensor* dst, std::array<LatentAttnParams, 2>& problems) {
    int n = 0;
    for (const bool full : {true, false}) {
        if (full ? node.full : node.latents) {
            problems[static_cast<size_t>(n)] = node.run_params(full, dst->src[n], nullptr);
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

}  // namespace

void gpu_mass_node(ggml_tensor*, int, int, void*) { GGML_ABORT("[gpu] expected this node on the GPU's executor"); }

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

}  // namespace lkv
