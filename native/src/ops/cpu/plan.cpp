#include <algorithm>

#include "ops/cpu/codes/code_scores.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/scratch.h"

namespace lkv {

namespace {

// Up to here all KV heads form one work item: rows are read front to back, a shared latent is dequantized once, and the
// scores of one tile (64 floats a row) stay in L1. Beyond, the products dominate and items are single heads.
constexpr int max_shared_rows = 128;
constexpr int target_block_rows = 96;  // 24 KiB of scores beside a K tile in L2

int max_kept(const LatentAttnParams& p, RowLayout RegionView::* side) {
    int kept = 0;
    for (int r = 0; r < p.n_regions; r++) {
        const RowLayout& layout = p.regions[r].*side;
        for (int g = 0; g < layout.n_groups; g++) kept = std::max(kept, layout.groups[g].kept);
    }
    return kept;
}

// What codes of K need: words of a row's group, segments of one.
void plan_codes(const LatentAttnParams& p, LatentAttnPlan& plan) {
    if (p.rebuilds()) return;
    for (int r = 0; r < p.n_regions; r++) {
        const RowLayout& layout = p.regions[r].k;
        for (int g = 0; g < layout.n_groups; g++) {
            if (!is_coded(layout, layout.groups[g])) continue;
            plan.k_words = std::max(plan.k_words, coded_words(layout, layout.groups[g]));
            plan.k_segments = std::max(plan.k_segments, layout.groups[g].n_segments);
        }
    }
}

int max_row_bytes(const LatentAttnParams& p) {
    int bytes = 0;
    for (int r = 0; r < p.n_regions; r++) {
        bytes = std::max({bytes, p.regions[r].k.row_bytes, p.regions[r].v.row_bytes});
    }
    return bytes;
}

// The fewest splits that keep n_threads threads at least 90 % busy.
int balanced_splits(int n_units, int n_threads) {
    for (int n = 1; n < n_threads; n++) {
        const int items = n_units * n;
        const int rounds = (items + n_threads - 1) / n_threads;
        if (10 * items >= 9 * rounds * n_threads) return n;
    }
    return n_threads;
}

}  // namespace

LatentAttnPlan latent_attn_plan(const LatentAttnParams& p, int n_threads) {
    check_latent_attn(p);
    const int rep = p.n_head / p.n_kv;
    const bool shared = p.n_tokens * p.n_head <= max_shared_rows;

    LatentAttnPlan plan{};
    plan.n_threads = std::max(1, n_threads);
    plan.unit_heads = shared ? p.n_kv : 1;
    plan.n_units = p.n_kv / plan.unit_heads;
    plan.n_split = balanced_splits(plan.n_units, plan.n_threads);
    plan.block_tokens = shared ? p.n_tokens : std::clamp(target_block_rows / rep, 1, p.n_tokens);
    plan.k_kept = max_kept(p, &RegionView::k);
    plan.v_kept = max_kept(p, &RegionView::v);
    plan.row_bytes = max_row_bytes(p);
    plan_codes(p, plan);

    // Per slot and head, rebuilding V costs rank · head_dim and saves rank − head_dim for each query row.
    const int64_t saved = int64_t{p.n_tokens} * rep * (plan.v_kept - p.head_dim);
    plan.v_rebuild = p.v_b != nullptr && saved > int64_t{plan.v_kept} * p.head_dim;
    plan.acc_width = round_up(p.v_b != nullptr && !plan.v_rebuild ? plan.v_kept : p.head_dim, panel_width);

    Arena arena;
    PartialSums(arena, p, plan);
    for (int i = 0; i < plan.n_threads; i++) ThreadScratch(arena, p, plan);
    plan.scratch_floats = (arena.bytes() + Arena::line) / sizeof(float);
    return plan;
}

}  // namespace lkv
