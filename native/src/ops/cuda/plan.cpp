#include "ops/cuda/plan.h"

#include <algorithm>
#include <numeric>

#include "ops/cuda/expand/score.h"
#include "ops/cuda/planners.h"
#include "ops/cuda/rows/tables.h"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

namespace {

struct Kernel {
    const char* name;
    bool (*takes)(const LatentAttnParams&, int capacity, const Device&, AttnArgs&);
    bool takes_all = false;  // soft caps and K in blocks of tokens too
};

// The first that takes a shape runs it.
constexpr Kernel kernels[] = {
    {"specialized", plan_specialized},
    {"mla", plan_mla},
    {"decode", plan_decode},
    {"expand keys", plan_expand_keys},
    {"wide", plan_wide},
    {"expand", plan_expand},
    {"prefill", plan_prefill},
    {"direct", plan_direct, true},
};

}  // namespace

void plan_attention(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a) {
    require(p.head_dim % 8 == 0 && p.head_dim <= 256, "a head_dim that is a multiple of 8 and at most 256",
            std::to_string(p.head_dim));
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
    const bool rebuild = p.rebuilds();
    a.rebuild = rebuild ? 1 : 0;
    a.k_extras = rebuild && (p.k_bias != nullptr || p.k_norm != nullptr) ? 1 : 0;
    a.in_blocks = std::any_of(p.regions, p.regions + p.n_regions,
                              [](const RegionView& region) { return lkv::in_blocks(region.k); })
                      ? 1
                      : 0;
    a.unit = rebuild ? 1 : std::gcd(p.k_group, p.v_group);
    a.k_blocks = side_blocks(p, &RegionView::k);
    a.v_blocks = side_blocks(p, &RegionView::v);
    const std::vector<int> k_bytes = group_bytes(p, &RegionView::k, a.k_blocks);
    const std::vector<int> v_bytes = group_bytes(p, &RegionView::v, a.v_blocks);
    a.k_pitch = pitch_of(*std::max_element(k_bytes.begin(), k_bytes.end()));
    a.v_pitch = pitch_of(*std::max_element(v_bytes.begin(), v_bytes.end()));
    a.least_tiles = 1;
    a.specialized = 0;
    a.late_parts = 0;
    a.absorbed_span = 0;
    a.decode = 0;
    a.wide = 0;
    a.mla = MlaPlan{};
    a.pair = 0;
    a.prefill = 0;
    a.expand = 0;
    a.leaves = Leaves::results;
    a.expand_by = ExpandBy::chunks;
    a.kind = common_kind(p, a);
    for (const Kernel& kernel : kernels) {
        AttnArgs plan = a;
        if ((p.softcap > 0.0f || a.in_blocks != 0) && !kernel.takes_all) continue;
        if (!kernel.takes(p, capacity, device, plan)) continue;
        a = plan;
        a.kernel = kernel.name;
        return;
    }
}

size_t parts_floats(const AttnArgs& a) {
    const size_t rows =
        static_cast<size_t>(a.n_tokens) * static_cast<size_t>(a.n_head) * static_cast<size_t>(a.v_blocks);
    if (a.mla.rows != 0) {  // parts in f16, and results of 64 channels where there are no clusters
        return rows * (static_cast<size_t>(a.n_split) * 32 + static_cast<size_t>(a.head_dim));
    }
    return rows * (static_cast<size_t>(a.n_split) * 64 +
                   static_cast<size_t>(a.wide != 0 || merges_apart(a) ? a.head_dim : 64));
}

size_t partial_floats(const AttnArgs& a) {
    if (a.expand == 0) return parts_floats(a);
    const ExpandedRows rows(a);
    if (a.expand_by == ExpandBy::scores) return parts_floats(a) + score_floats(a);
    if (a.mla.rows != 0) return parts_floats(a) + static_cast<size_t>(rows.v) / sizeof(float);
    return parts_floats(on_expanded_rows(a)) + static_cast<size_t>(rows.total) / sizeof(float);
}

size_t partial_ml_floats(const AttnArgs& a) {
    return static_cast<size_t>(a.n_split) * static_cast<size_t>(a.n_tokens) * static_cast<size_t>(a.n_head) * 2;
}

}  // namespace lkv::cuda
