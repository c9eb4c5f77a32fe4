#include "ops/cuda/attend.h"

#include <algorithm>
#include <numeric>

#include "ops/cuda/rows/tables.h"
#include "ops/cuda/softmax/merge.h"

namespace lkv::cuda {

namespace {

// The contract's shape, as the device has it.
void flatten(const LatentAttnParams& p, Problem& a) {
    a.n_tokens = p.n_tokens;
    a.q_width = p.q_width;
    a.n_head = p.n_head;
    a.n_kv = p.n_kv;
    a.head_dim = p.head_dim;
    a.k_group = p.k_group;
    a.v_group = p.v_group;
    a.window = p.window;
    a.scale = p.scale;
    a.softcap = p.softcap;
    a.k_norm_eps = p.k_norm_eps;
    a.rope_mscale = p.rope_mscale;
    a.n_rot = p.rope_freqs != nullptr ? p.n_rot : 0;
    a.rope_neox = p.rope_neox ? 1 : 0;
    a.k_rank_max = p.k_rank_max;
    a.v_rank_max = p.v_rank_max;
    a.n_regions = p.n_regions;
    a.rebuild = p.rebuilds() ? 1 : 0;
    a.k_extras = p.rebuilds() && (p.k_bias != nullptr || p.k_norm != nullptr) ? 1 : 0;
    const auto any_k = [&](bool (*is)(const RowLayout&)) {
        return std::any_of(p.regions, p.regions + p.n_regions, [&](const RegionView& region) { return is(region.k); });
    };
    a.in_blocks = any_k(lkv::in_token_blocks) ? 1 : 0;
    a.scaled = any_k(lkv::has_group_scales) ? 1 : 0;
    a.k_blocks = side_blocks(p, &RegionView::k);
    a.v_blocks = side_blocks(p, &RegionView::v);
    a.kind = common_kind(p, a.k_blocks, a.v_blocks);
}

// What a channel of a full row takes of a multiprocessor's time, of one that is decoded with scales of its segment or of its group. 8B at
// 14 %, 24576, 32768 and 65536 tokens, segments' scales, where a row counts as 0.7, 1 and 1.4 of the latents' slots: 3.85, 3.83 and 3.98 ms a
// step; 4.19, 3.98 and 4.08; 5.24, 4.64 and 4.64; it has 1.33 times as many channels. With groups' scales (1.03 times) a slot of latents
// takes 0.0985 us, a full row 0.12.
constexpr float channel_cost = 0.75f;
constexpr float scaled_channel_cost = 1.15f;

}  // namespace

Plan plan_attention(const Request& request, const Problem& problem, std::string* refusals) {
    const LatentAttnParams& p = request.params;
    require(p.head_dim % 8 == 0 && p.head_dim <= most_head_dim,
            "a head_dim that is a multiple of 8 and at most " + std::to_string(most_head_dim),
            std::to_string(p.head_dim));
    Plan common;
    static_cast<Problem&>(common) = problem;
    flatten(p, common);
    static_cast<Cut&>(common) = Cut{};
    common.unit = common.rebuild != 0 ? 1 : std::gcd(p.k_group, p.v_group);
    common.least_tiles = 1;
    for (const Kernel* kernel : all_kernels()) {
        Plan plan = common;
        plan.kernel = kernel;
        const char* const reason = p.head_dim > kernel->widest_head                 ? "heads are too wide"
                                   : p.softcap > 0.0f && !kernel->takes_caps        ? "scores have a soft cap"
                                   : common.in_blocks != 0 && !kernel->takes_blocks ? "K is in blocks of tokens"
                                                                                    : kernel->takes(request, plan);
        if (reason == nullptr) {
            plan.items = plan.n_kv / plan.unit;
            return plan;
        }
        if (refusals != nullptr)
            *refusals += (refusals->empty() ? "" : "; ") + std::string(kernel->name) + ": " + reason;
    }
    require(false, "a shape that some kernel takes", "one that none does");
    return common;
}

size_t partial_floats(const Plan& plan) {
    return plan.kernel->sums_floats != nullptr ? plan.kernel->sums_floats(plan) : parts_floats(plan);
}

size_t partial_ml_floats(const CutProblem& p) {
    return static_cast<size_t>(p.n_split) * static_cast<size_t>(p.n_tokens) * static_cast<size_t>(p.n_head) * 2;
}

int items_of_group(const Plan& plan) { return std::lcm(plan.unit, std::lcm(plan.k_group, plan.v_group)) / plan.unit; }

Plan warm_up_plan(const Plan& plan, int items, int parts) {
    Plan of = plan;
    of.items = items;
    of.n_split = std::min(plan.n_split, parts);
    return of;
}

std::optional<Plan> warm_up(const Plan& plan) {
    // steps of several sequences wait for their reads, those that choose them for their choice
    if (plan.apart != 0 && plan.late_slots == 0) return std::nullopt;
    if (plan.kernel->warm_up != nullptr) return plan.kernel->warm_up(plan);
    // All items where the kernel multiplies with B_v, which comes into the L2 cache so (8B, rotated 64, q4: 350 tokens/s at depth 0 with one
    // head of eight, 361 to 363 with all). One slot a region, and of a part two thread blocks where rows are shared out.
    return warm_up_plan(plan, plan.v_b != nullptr ? plan.items : items_of_group(plan), 2 * plan.n_regions);
}

cudaError_t attend(const Plan& plan, cudaStream_t stream) {
    Plan launched = plan;
    // a single part too is merged where merging rotates what it leaves
    const bool rotated_later = plan.v_hadamard != 0 && !plan.kernel->rotates;
    if (rotated_later) launched.leaves = Leaves::parts;
    const cudaError_t error = plan.kernel->launch(launched, stream);
    if (error != cudaSuccess || plan.leaves == Leaves::parts) return error;
    if (plan.kernel->finish != nullptr) return plan.kernel->finish(plan, nullptr, stream);
    if (plan.n_split == 1 && plan.v_b == nullptr && !rotated_later) return error;
    return merge_parts(launched, nullptr, stream);
}

cudaError_t begin_beside(const Plan& latents, cudaStream_t stream) {
    return latents.kernel->finish != nullptr ? latents.kernel->launch(latents, stream) : cudaSuccess;
}

cudaError_t end_beside(const Plan& latents, const CutProblem& full, cudaStream_t stream) {
    if (latents.kernel->finish != nullptr) return latents.kernel->finish(latents, &full, stream);
    Plan parts = latents;
    parts.leaves = Leaves::parts;
    const cudaError_t error = parts.kernel->launch(parts, stream);
    return error == cudaSuccess ? merge_parts(parts, &full, stream) : error;
}

// Windows that have two parts at most are read in the time that the latents' set-up takes.
Sharing shared_out(const Plan& full, const Plan& latents, const Device& device) {
    constexpr int few_parts = 2;
    if (full.apart != 0 || latents.apart != 0 || latents.rebuild != 0 || full.n_split <= few_parts) return {};
    const auto blocks_of = [&](const Plan& p) {
        return std::clamp(device.n_multiprocessors / p.n_split, 1, p.items * ((rows_of(p) + 7) / 8));
    };
    const int window_blocks = blocks_of(full);
    const int latent_blocks = blocks_of(latents);
    // of a slot, in blocks of 64 as often as a thread block reads it
    const auto channels = [](const Plan& p, int blocks) {
        return static_cast<float>((p.k_blocks + p.v_blocks) * blocks);
    };
    return {.windows = full.n_slots,
            .latents = latents.n_slots,
            .n_windows = full.n_regions,
            .n_latents = latents.n_regions,
            .parts = full.n_split,
            .all_parts = device.n_multiprocessors / window_blocks,
            .window_blocks = window_blocks,
            .latent_blocks = latent_blocks,
            .window_cost = (latents.scaled != 0 ? scaled_channel_cost : channel_cost) * channels(full, window_blocks) /
                           channels(latents, latent_blocks)};
}

}  // namespace lkv::cuda
