#include <algorithm>

#include "ops/cuda/expand/score.h"
#include "ops/cuda/plan.h"
#include "ops/cuda/planners.h"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

AttnArgs on_expanded_rows(const AttnArgs& args) {
    AttnArgs full = args;
    full.rebuild = 0;
    full.k_extras = 0;
    full.n_rot = 0;
    full.v_b = nullptr;
    full.v_rank_max = 0;
    full.q_width = args.head_dim;
    full.k_group = full.v_group = full.unit = 1;
    full.n_regions = 1;
    full.regions[0] = args.expanded;
    full.prefill = 1;
    full.kind = any_kind;
    full.k_blocks = full.v_blocks = (args.head_dim + 63) / 64;
    full.k_pitch = full.v_pitch = pitch_of(2 * args.head_dim);
    return full;
}

namespace {

// Bytes of expanded rows, at most: about an L2 cache.
constexpr int most_bytes = 32 << 20;

int row_bytes(const AttnArgs& a) { return a.n_kv * a.head_dim * 2; }

ExpandBy by_units(const Device& device) { return device.specialized ? ExpandBy::warpgroup : ExpandBy::units; }

}  // namespace

// Whether a chunk of the context is expanded to full rows of f16 before it is attended to.
bool plan_expand(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a) {
    static_assert(most_expanded_head <= prefill_channels[1]);
    if (a.rebuild == 0 || a.head_dim > most_expanded_head) return false;
    a.expand = std::min(std::clamp(most_bytes / (2 * row_bytes(a)) / expand_slots * expand_slots, 1024, 8192),
                        round_up(capacity + expand_tile * p.n_regions, expand_slots));
    a.tile = expand_tile;
    if (side_has_units(p, &RegionView::k, a.k_blocks) && side_has_units(p, &RegionView::v, a.v_blocks)) {
        a.expand_by = by_units(device);
    }
    AttnArgs full = on_expanded_rows(a);
    if (!plan_prefill_rows(a.expand, device, full.k_pitch, full.v_pitch, full, true) || full.prefill != 1) return false;
    a.buffers = full.buffers;
    a.stages = full.stages;
    a.n_split = full.n_split;
    return true;
}

// Whether K alone is expanded, for the MLA kernel: of as many KV heads at once as it has units for.
bool plan_expand_keys(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a) {
    if (a.rebuild == 0 || a.head_dim % unit_channels != 0 || a.head_dim > most_expanded_head) return false;
    for (int n = 1; n <= a.v_group && n * a.head_dim <= most_units * unit_channels; n++) {
        if (a.v_group % n == 0) a.unit = n;
    }
    if (side_has_units(p, &RegionView::k, a.k_blocks)) {
        a.expand_by = plan_scores(device, a) ? ExpandBy::scores : by_units(device);
    }
    const bool scores = a.expand_by == ExpandBy::scores;
    if (!plan_mla_rows(p, device, a)) return false;
    const int slot_bytes = scores ? 4 * a.n_tokens * a.n_head : row_bytes(a);
    a.expand = std::min(most_bytes / slot_bytes / expand_slots * expand_slots,
                        round_up(capacity + expand_tile * p.n_regions, expand_slots));
    return true;
}

}  // namespace lkv::cuda
