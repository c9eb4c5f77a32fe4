#include "ops/cpu/latent_attn.h"

#include <algorithm>
#include <cmath>

#include "ops/cpu/codes/code_values.h"
#include "ops/cpu/direct.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/rebuild.h"
#include "ops/cpu/scratch.h"
#include "ops/cpu/softmax.h"
#include "ops/cpu/tile.h"

namespace lkv {

namespace {

// How the query rows of a run of heads meet the stored rows of a tile.
enum class Way {
    codes,        // integer products with codes
    stored_rows,  // f32 products with rows as they lie
    tile,         // the tile in f32, and a matrix product
};

// least: query rows from which on integer products pay.
Way way_for(int n_rows, int least, const RowLayout& layout, const GroupLayout& group) {
    if (n_rows >= least && n_rows <= max_coded_rows && is_coded(layout, group)) return Way::codes;
    return n_rows <= max_direct_rows ? Way::stored_rows : Way::tile;
}

// One thread's pass over its work items. A tile goes through scores, weights and values for one block of tokens after
// the other; what was dequantized or rebuilt for a tile is kept until the next tile.
class Worker {
public:
    Worker(const LatentAttnParams& p, const LatentAttnPlan& plan, const PartialSums& partial, const ThreadScratch& tmp)
        : p_(p), plan_(plan), partial_(partial), tmp_(tmp), rep_(p.n_head / p.n_kv) {
        std::fill_n(tmp_.zero_row, plan.row_bytes, uint8_t{0});
        tmp_.forget_coded();
    }

    void run(int unit, int split) {
        first_head_ = unit * plan_.unit_heads;
        split_ = split;
        for (int t = 0; t < p_.n_tokens; t++) {
            for (int r = 0; r < plan_.unit_heads * rep_; r++) {
                const int64_t row = int64_t{t} * p_.n_head + first_head_ * rep_ + r;
                partial_.state(split, row) = SoftmaxState{};
                std::fill_n(partial_.sum(split, row), plan_.acc_width, 0.0f);
            }
        }
        int number = 0;  // of the tile
        for (int i = 0; i < p_.n_regions; i++) {
            const RegionView& region = p_.regions[i];
            for (int first = 0; first < region.n_slots; first += tile_slots, number++) {
                if (number % plan_.n_split == split) tile(region, first);
            }
        }
    }

private:
    void tile(const RegionView& region, int first) {
        const TileVisibility visibility(region, first, p_.window);
        int n_visible = 0;
        uint64_t seen = 0;
        for (int t = 0; t < p_.n_tokens; t++) {
            const uint64_t mask = visibility.slots(p_.q_seq[t], p_.q_pos[t]);
            if (mask == 0) continue;
            tmp_.tokens[n_visible] = t;
            tmp_.masks[n_visible++] = mask;
            seen |= mask;
        }
        if (n_visible == 0) return;

        region_ = &region;
        positions_ = visibility.positions();
        k_rows_.find(region.k_row(first), region.k.row_bytes, seen, tmp_.zero_row);
        v_rows_.find(region.v_row(first), region.v.row_bytes, seen, tmp_.zero_row);
        const int next = first + plan_.n_split * tile_slots;
        const int n_next = std::clamp(region.n_slots - next, 0, tile_slots);
        k_ahead_ = {region.k_row(next), int64_t{n_next} * region.k.row_bytes};
        v_ahead_ = {region.v_row(next), int64_t{n_next} * region.v.row_bytes};
        k_group_ = v_group_ = k_head_ = v_head_ = -1;
        has_rope_ = false;
        for (int i = 0; i < n_visible; i += plan_.block_tokens) {
            tokens_ = tmp_.tokens + i;
            masks_ = tmp_.masks + i;
            n_tokens_ = std::min(plan_.block_tokens, n_visible - i);
            scores();
            weights();
            values();
        }
    }

    // Rows of a block: KV head by KV head, token by token, then the head's query heads; so the rows of a run of KV heads
    // follow each other in tmp_.scores.
    int rows_per_head() const { return n_tokens_ * rep_; }
    float* scores_of(int head) const {
        return tmp_.scores + ptrdiff_t{head - first_head_} * rows_per_head() * tile_slots;
    }

    // per_run(first head, number of heads) for every stretch of this item's KV heads that shares a latent.
    template <class PerRun>
    void for_runs(int run_heads, PerRun per_run) const {
        const int end = first_head_ + plan_.unit_heads;
        for (int j = first_head_; j < end;) {
            const int next = std::min(end, (j / run_heads + 1) * run_heads);
            per_run(j, next - j);
            j = next;
        }
    }

    // Row pointers of a run: address(token, query head).
    template <class T, class Address>
    void list_rows(int head, int n_heads, T* rows, Address address) const {
        int n = 0;
        for (int j = head; j < head + n_heads; j++) {
            for (int i = 0; i < n_tokens_; i++) {
                for (int r = 0; r < rep_; r++) rows[n++] = address(int64_t{tokens_[i]} * p_.n_head + j * rep_ + r);
            }
        }
    }

    void scores() {
        for_runs(p_.rebuilds() ? 1 : p_.k_group, [&](int head, int n_heads) {
            const GroupLayout& group = region_->k.groups[head / p_.k_group];
            const int n = n_heads * rows_per_head();
            const Way way = p_.rebuilds() ? Way::tile : way_for(n, 1, region_->k, group);
            if (way == Way::tile) load_k(head, group);
            float* const out = scores_of(head);
            for (int r = 0; r < n; r++) tmp_.c[r] = out + r * tile_slots;
            if (way == Way::codes) {
                coded_scores(region_->k, group, k_rows_, k_ahead_, coded(head, n_heads, group), tmp_.words, tmp_.c);
                return;
            }
            list_queries(head, n_heads);
            if (way == Way::stored_rows) {
                direct_scores(region_->k, group, k_rows_, k_ahead_, n, tmp_.a, tmp_.c);
                return;
            }
            const int width = p_.rebuilds() ? p_.head_dim : group.kept;
            multiply(n, tile_slots, width, tmp_.a, 1, {tmp_.k, panel_width, ptrdiff_t{width} * panel_width}, tmp_.c,
                     panel_width, false);
        });
    }

    void list_queries(int head, int n_heads) const {
        list_rows(head, n_heads, tmp_.a, [&](int64_t row) { return p_.q + row * p_.q_width; });
    }

    // The block's queries of a run of heads as integers: those of the tile before, where it was seen by the same tokens.
    const CodedQueries& coded(int head, int n_heads, const GroupLayout& group) {
        CodedRun& run = tmp_.coded[head / p_.k_group - first_head_ / p_.k_group];
        if (run.region != region_ || run.first_head != head ||
            !std::equal(tokens_, tokens_ + n_tokens_, run.tokens, run.tokens + run.n_tokens)) {
            run.region = region_;
            run.first_head = head;
            run.n_tokens = n_tokens_;
            std::copy_n(tokens_, n_tokens_, run.tokens);
            run.queries.n_rows = n_heads * rows_per_head();
            list_queries(head, n_heads);
            code_queries(region_->k, group, {tmp_.a, static_cast<size_t>(run.queries.n_rows)}, run.queries);
        }
        return run.queries;
    }

    // Leaves the K tile of a head (direct: of its group) in tmp_.k.
    void load_k(int head, const GroupLayout& group) {
        const int g = head / p_.k_group;
        const bool direct = !p_.rebuilds();
        if (k_group_ != g) {
            load_by_channel(region_->k, group, k_rows_, direct ? tmp_.k : tmp_.k_latent);
            k_group_ = g;
        }
        if (direct || k_head_ == head) return;
        if (p_.rope_freqs != nullptr && !has_rope_) {
            rope_tile(p_, positions_, tmp_.rope);
            has_rope_ = true;
        }
        rebuild_k(p_, head, group.kept, tmp_.k_latent, tmp_.rope, tmp_.k, tmp_.a, tmp_.c);
        k_head_ = head;
    }

    void weights() {
        for (int j = first_head_; j < first_head_ + plan_.unit_heads; j++) {
            float* s = scores_of(j);
            for (int i = 0; i < n_tokens_; i++) {
                for (int r = 0; r < rep_; r++, s += tile_slots) {
                    const int head = j * rep_ + r;
                    const int64_t row = int64_t{tokens_[i]} * p_.n_head + head;
                    SoftmaxState& state = partial_.state(split_, row);
                    const float factor = weigh(state, s, masks_[i], head, p_.q_pos[tokens_[i]]);
                    if (factor != 1.0f) {
                        float* sum = partial_.sum(split_, row);
                        for (int c = 0; c < plan_.acc_width; c += lanes)
                            store8(sum + c, load8(sum + c) * splat(factor));
                    }
                }
            }
        }
    }

    float weigh(SoftmaxState& state, float* s, uint64_t mask, int head, int32_t pos) const {
        float scale = p_.scale;
        if (p_.softcap > 0.0f) {
            const f32x8 in = splat(scale / p_.softcap);
            for (int v = 0; v < tile_slots; v += lanes) store8(s + v, splat(p_.softcap) * tanh8(load8(s + v) * in));
            scale = 1.0f;
        }
        if (p_.alibi_slopes == nullptr) {
            return absorb(state, s, mask, scale, [](int) { return f32x8{}; });
        }
        const f32x8 slope = splat(p_.alibi_slopes[head]);
        return absorb(state, s, mask, scale, [&](int v) {
            i32x8 position;
            memcpy(&position, positions_ + v * lanes, sizeof position);
            return to_f32(position - pos) * slope;
        });
    }

    void values() {
        for_runs(plan_.v_rebuild ? 1 : p_.v_group, [&](int head, int n_heads) {
            const GroupLayout& group = region_->v.groups[head / p_.v_group];
            const int n = n_heads * rows_per_head();
            const Way way = plan_.v_rebuild ? Way::tile : way_for(n, min_coded_rows, region_->v, group);
            if (way == Way::tile) load_v(head, group);
            const float* const weight = scores_of(head);
            for (int r = 0; r < n; r++) tmp_.a[r] = weight + r * tile_slots;
            list_rows(head, n_heads, tmp_.c, [&](int64_t row) { return partial_.sum(split_, row); });
            if (way == Way::codes) {
                coded_values(region_->v, group, v_rows_, v_ahead_, n, tmp_.a, tmp_.c);
                return;
            }
            if (way == Way::stored_rows) {
                direct_values(region_->v, group, v_rows_, v_ahead_, n, tmp_.a, tmp_.c);
                return;
            }
            const int width = round_up(plan_.v_rebuild ? p_.head_dim : group.kept, panel_width);
            multiply(n, width, tile_slots, tmp_.a, 1, {tmp_.v, panel_width, tile_slots * panel_width}, tmp_.c,
                     panel_width, true);
        });
    }

    // Leaves the V tile of a group (rebuilt: of a head) in tmp_.v.
    void load_v(int head, const GroupLayout& group) {
        const int g = head / p_.v_group;
        if (!plan_.v_rebuild) {
            if (v_group_ != g) load_by_slot(region_->v, group, v_rows_, tmp_.v);
        } else {
            if (v_group_ != g) load_by_channel(region_->v, group, v_rows_, tmp_.v_latent);
            if (v_head_ != head) rebuild_v(p_, head, group.kept, tmp_.v_latent, tmp_.v, tmp_.a, tmp_.c);
            v_head_ = head;
        }
        v_group_ = g;
    }

    const LatentAttnParams& p_;
    const LatentAttnPlan& plan_;
    const PartialSums& partial_;
    const ThreadScratch& tmp_;
    const int rep_;

    int first_head_ = 0;
    int split_ = 0;
    const RegionView* region_ = nullptr;
    const int32_t* positions_ = nullptr;  // [64] of the tile
    TileRows k_rows_{};
    TileRows v_rows_{};  // without blocks
    ReadAhead k_ahead_;
    ReadAhead v_ahead_;
    const int32_t* tokens_ = nullptr;  // the block
    const uint64_t* masks_ = nullptr;
    int n_tokens_ = 0;
    int k_group_ = -1;  // what the tiles hold, -1 = nothing
    int k_head_ = -1;
    int v_group_ = -1;
    int v_head_ = -1;
    bool has_rope_ = false;
};

}  // namespace

void latent_attn_partial(const LatentAttnParams& p, const LatentAttnPlan& plan, float* scratch, int ith, int nth) {
    const int n_threads = std::min(nth, plan.n_threads);
    if (ith >= n_threads) return;
    Arena arena(scratch);
    const PartialSums partial(arena, p, plan);
    for (int i = 0; i < ith; i++) ThreadScratch(arena, p, plan);
    const ThreadScratch tmp(arena, p, plan);
    Worker worker(p, plan, partial, tmp);
    for (int item = ith; item < plan.n_units * plan.n_split; item += n_threads) {
        worker.run(item % plan.n_units, item / plan.n_units);
    }
}

}  // namespace lkv
