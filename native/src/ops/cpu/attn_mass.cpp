#include "ops/cpu/attn_mass.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/vmath.h"
#include "cache/evict/gumbel.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/rebuild.h"
#include "ops/cpu/scratch.h"
#include "ops/cpu/tile.h"

namespace lkv {
namespace {

constexpr int most_rows = 96;           // as a tile of attention has
constexpr int shared_scores = 1 << 16;  // floats of scores that a thread keeps, if that is a row of each query head
constexpr float never = -std::numeric_limits<float>::infinity();

struct MassScratch {
    float* scores;  // [n_rows, n_slots]
    float* mass;    // [n_slots]
    float* latent;  // by channel
    float* k;       // by channel
    float* rope;
    int32_t* tokens;  // [n_rows] of the block
    const float** a;
    float** c;
    uint8_t* zero_row;

    MassScratch(Arena& arena, const AttnMassParams& params, const AttnMassPlan& plan) {
        int k_floats = 0;
        int n_rot = 0;
        for (const LatentAttnParams& p : params.problems) {
            k_floats = std::max(k_floats, p.rebuilds() ? p.head_dim : plan.k_kept);
            n_rot = std::max(n_rot, p.rebuilds() ? p.n_rot : 0);
        }
        const int n_pointers = std::max({plan.n_rows, params.problems[0].head_dim, tile_slots});
        scores = arena.take<float>(int64_t{plan.n_rows} * plan.n_slots);
        mass = arena.take<float>(plan.n_slots);
        latent = arena.take<float>(plan.k_kept * tile_slots);
        k = arena.take<float>(k_floats * tile_slots);
        rope = arena.take<float>(n_rot * tile_slots);
        tokens = arena.take<int32_t>(plan.n_rows);
        a = arena.take<const float*>(n_pointers);
        c = arena.take<float*>(n_pointers);
        zero_row = arena.take<uint8_t>(plan.row_bytes);
    }
};

// The queries of one KV head.
class MassWorker {
public:
    MassWorker(const AttnMassParams& params, const AttnMassPlan& plan, const MassScratch& tmp, int head)
        : params_(params),
          any_(params.problems[0]),
          plan_(plan),
          tmp_(tmp),
          head_(head),
          rep_(any_.n_head / any_.n_kv) {
        std::fill_n(tmp_.zero_row, plan.row_bytes, uint8_t{0});
        std::fill_n(tmp_.mass, plan.n_slots, 0.0f);
    }

    // out: [params.n_slots()]
    void run(float* out) {
        const int block = std::max(1, plan_.n_rows / rep_);
        for (int t = 0; t < any_.n_tokens;) {
            n_tokens_ = 0;
            for (; t < any_.n_tokens && n_tokens_ < block; t++) {
                if (params_.weights[t].weight > 0.0f) tmp_.tokens[n_tokens_++] = t;
            }
            if (n_tokens_ > 0) add_block();
        }
        int first = 0;
        each_region([&](const LatentAttnParams&, const RegionView& region, int at) {
            std::copy_n(tmp_.mass + at, region.n_slots, out + first);
            first += region.n_slots;
        });
    }

private:
    // visit(problem, region, its first slot among the tiles of all)
    template <class Visit>
    void each_region(Visit visit) {
        int at = 0;
        for (const LatentAttnParams& p : params_.problems) {
            for (int r = 0; r < p.n_regions; r++) {
                visit(p, p.regions[r], at);
                at += round_up(p.regions[r].n_slots, tile_slots);
            }
        }
        n_slots_ = at;
    }

    void add_block() {
        each_region([&](const LatentAttnParams& p, const RegionView& region, int at) {
            for (int first = 0; first < region.n_slots; first += tile_slots) tile(p, region, first, at + first);
        });
        for (int row = 0; row < n_tokens_ * rep_; row++) add_row(row);
    }

    float* scores_of(int row, int at) const { return tmp_.scores + int64_t{row} * plan_.n_slots + at; }

    // Scores of the block's rows for one tile, −∞ where a slot is not seen.
    void tile(const LatentAttnParams& p, const RegionView& region, int first, int at) {
        const TileVisibility visibility(region, first, p.window);
        uint64_t seen = 0;
        for (int i = 0; i < n_tokens_; i++) {
            seen |= visibility.slots(p.q_seq[tmp_.tokens[i]], p.q_pos[tmp_.tokens[i]]);
        }
        const int n = n_tokens_ * rep_;
        if (seen == 0) {
            for (int row = 0; row < n; row++) std::fill_n(scores_of(row, at), tile_slots, never);
            return;
        }
        const int width = load_k(p, region, first, seen, visibility.positions());
        for (int row = 0; row < n; row++) {
            const int64_t q_row = int64_t{tmp_.tokens[row / rep_]} * p.n_head + head_ * rep_ + row % rep_;
            tmp_.a[row] = p.q + q_row * p.q_width;
            tmp_.c[row] = scores_of(row, at);
        }
        multiply(n, tile_slots, width, tmp_.a, 1, {tmp_.k, panel_width, ptrdiff_t{width} * panel_width}, tmp_.c,
                 panel_width, false);
        for (int row = 0; row < n; row++) {
            const int t = tmp_.tokens[row / rep_];
            finish(p, row, visibility.slots(p.q_seq[t], p.q_pos[t]), visibility.positions(), scores_of(row, at));
        }
    }

    // Leaves the tile's keys in tmp_.k; returns their channels.
    int load_k(const LatentAttnParams& p, const RegionView& region, int first, uint64_t seen,
               const int32_t* positions) {
        TileRows rows;
        rows.find(region.k_row(first), region.k.row_bytes, seen, tmp_.zero_row);
        const GroupLayout& group = region.k.groups[head_ / p.k_group];
        if (!p.rebuilds()) {
            load_by_channel(region.k, group, rows, tmp_.k);
            return group.kept;
        }
        load_by_channel(region.k, group, rows, tmp_.latent);
        if (p.rope_freqs != nullptr) rope_tile(p, positions, tmp_.rope);
        rebuild_k(p, head_, group.kept, tmp_.latent, tmp_.rope, tmp_.k, tmp_.a, tmp_.c);
        return p.head_dim;
    }

    // Products become the logits of the mass's softmax.
    void finish(const LatentAttnParams& p, int row, uint64_t visible, const int32_t* positions, float* s) const {
        const int t = tmp_.tokens[row / rep_];
        const int head = head_ * rep_ + row % rep_;
        const float cold = 1.0f / params_.weights[t].temperature;
        for (int v = 0; v < tile_slots; v += lanes) {
            f32x8 x = load8(s + v);
            if (p.softcap > 0.0f) {
                x = splat(p.softcap) * tanh8(x * splat(p.scale / p.softcap));
            } else {
                x = x * splat(p.scale);
            }
            store8(s + v, x * splat(cold));
        }
        const uint64_t seed = noise_seed(params_.layer, head, p.q_pos[t]);
        for (int i = 0; i < tile_slots; i++) {
            if ((visible >> i & 1) == 0) {
                s[i] = never;
                continue;
            }
            const auto distance = static_cast<float>(p.q_pos[t] - positions[i]);
            if (p.alibi_slopes != nullptr) s[i] -= p.alibi_slopes[head] * distance * cold;
            if (params_.has_noise) s[i] += gumbel(seed, positions[i]) * cold;
        }
    }

    // A row's softmax, added to the masses.
    void add_row(int row) const {
        const QueryWeight& weight = params_.weights[tmp_.tokens[row / rep_]];
        float* const s = scores_of(row, 0);
        const float sink = any_.sinks == nullptr ? never : any_.sinks[head_ * rep_ + row % rep_] / weight.temperature;
        f32x8 highest = splat(sink);
        for (int v = 0; v < n_slots_; v += lanes) highest = max8(highest, load8(s + v));
        const float top = max(highest);
        if (top == never) return;
        f32x8 total{};
        for (int v = 0; v < n_slots_; v += lanes) {
            const f32x8 e = exp8(load8(s + v) - splat(top));
            store8(s + v, e);
            total += e;
        }
        const float all = sum(total) + (any_.sinks == nullptr ? 0.0f : std::exp(sink - top));
        const f32x8 factor = splat(weight.weight / all);
        for (int v = 0; v < n_slots_; v += lanes) {
            store8(tmp_.mass + v, fma8(load8(s + v), factor, load8(tmp_.mass + v)));
        }
    }

    const AttnMassParams& params_;
    const LatentAttnParams& any_;
    const AttnMassPlan& plan_;
    const MassScratch& tmp_;
    const int head_;
    const int rep_;
    int n_tokens_ = 0;  // of the block
    int n_slots_ = 0;
};

}  // namespace

AttnMassPlan attn_mass_plan(const AttnMassParams& params, int most_slots, int n_threads) {
    AttnMassPlan plan{};
    const LatentAttnParams& any = params.problems[0];
    const int rep = any.n_head / any.n_kv;
    plan.n_threads = std::clamp(n_threads, 1, any.n_kv);
    plan.n_slots = std::max(most_slots, tile_slots);
    plan.n_rows = std::max(rep, std::min(most_rows, shared_scores / plan.n_slots) / rep * rep);
    for (const LatentAttnParams& p : params.problems) {
        for (int r = 0; r < p.n_regions; r++) {
            const RowLayout& k = p.regions[r].k;
            plan.row_bytes = std::max(plan.row_bytes, k.row_bytes);
            for (int g = 0; g < k.n_groups; g++) plan.k_kept = std::max(plan.k_kept, k.groups[g].kept);
        }
    }
    Arena arena;
    for (int i = 0; i < plan.n_threads; i++) MassScratch(arena, params, plan);
    plan.scratch_floats = (arena.bytes() + Arena::line) / sizeof(float);
    return plan;
}

void attn_mass(const AttnMassParams& params, const AttnMassPlan& plan, float* scratch, float* mass, int ith, int nth) {
    const int n_threads = std::min(nth, plan.n_threads);
    if (ith >= n_threads) return;
    Arena arena(scratch);
    for (int i = 0; i < ith; i++) MassScratch(arena, params, plan);
    const MassScratch tmp(arena, params, plan);
    const int n_slots = params.n_slots();
    for (int head = ith; head < params.problems[0].n_kv; head += n_threads) {
        MassWorker(params, plan, tmp, head).run(mass + int64_t{head} * n_slots);
    }
}

}  // namespace lkv
