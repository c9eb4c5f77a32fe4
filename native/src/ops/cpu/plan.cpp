#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/cpu/codes/code_scores.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/scratch.h"

namespace lkv {

namespace {

// Up to here all KV heads form one work item: rows are read front to back, a shared latent is dequantized once, and the
// scores of one tile (64 floats a row) stay in L1. Beyond, the products dominate and items are single heads.
constexpr int max_shared_rows = 128;
constexpr int target_block_rows = 96;  // 24 KiB of scores beside a K tile in L2

void require(bool holds, const std::string& expected, const std::string& got) {
    if (!holds) throw std::invalid_argument("[latent_attn] expected " + expected + "; got " + got);
}

void check_rows(const RowLayout& layout, int n_groups, int max_width, const char* name) {
    require(layout.n_groups == n_groups, std::to_string(n_groups) + " groups in a " + name + " row",
            std::to_string(layout.n_groups));
    for (int g = 0; g < n_groups; g++) {
        require(layout.groups[g].kept <= max_width,
                "at most " + std::to_string(max_width) + " channels in a group of a " + name + " row",
                std::to_string(layout.groups[g].kept));
    }
}

void check(const LatentAttnParams& p) {
    require(p.n_tokens > 0, "at least one token", std::to_string(p.n_tokens));
    require(p.n_kv > 0 && p.n_head % p.n_kv == 0, "n_head divisible by n_kv",
            std::to_string(p.n_head) + " and " + std::to_string(p.n_kv));
    require(p.k_group > 0 && p.n_kv % p.k_group == 0, "a k_group that divides n_kv = " + std::to_string(p.n_kv),
            std::to_string(p.k_group));
    require(p.v_group > 0 && p.n_kv % p.v_group == 0, "a v_group that divides n_kv = " + std::to_string(p.n_kv),
            std::to_string(p.v_group));
    require(p.n_regions > 0 && p.n_regions <= max_regions, "1 … " + std::to_string(max_regions) + " regions",
            std::to_string(p.n_regions));
    if (p.rebuilds()) {
        require(p.q_width == p.head_dim, "q_width = head_dim = " + std::to_string(p.head_dim) + " on the rebuild path",
                std::to_string(p.q_width));
        require(p.rope_freqs == nullptr || (p.n_rot > 0 && p.n_rot % 2 == 0 && p.n_rot <= p.head_dim),
                "an even n_rot up to head_dim = " + std::to_string(p.head_dim), std::to_string(p.n_rot));
    }
    for (int r = 0; r < p.n_regions; r++) {
        check_rows(p.regions[r].k, p.n_kv / p.k_group, p.rebuilds() ? p.k_rank_max : p.q_width, "K");
        check_rows(p.regions[r].v, p.n_kv / p.v_group, p.v_b != nullptr ? p.v_rank_max : p.head_dim, "V");
        require(!in_blocks(p.regions[r].v), "single rows of V", "blocks");
    }
}

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
    check(p);
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
