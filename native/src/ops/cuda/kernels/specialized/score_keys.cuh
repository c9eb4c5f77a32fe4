// The specialized kernel's second role: keys of 64 slots from their latents, 128 dimensions at once (warpgroup.cuh), turned by their
// positions (rebuild_tables.cuh), times the queries; then softmax weights for the warps that sum. Two warpgroups work at different
// tiles or, where KV heads share their latents, for different heads, so that one multiplies while the other turns keys.
#pragma once

#include <climits>

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/gpu/pair.cuh"
#include "ops/cuda/gpu/warpgroup.cuh"
#include "ops/cuda/kernels/decode/rebuild_tables.cuh"
#include "ops/cuda/kernels/specialized/absorb.cuh"
#include "ops/cuda/kernels/specialized/tiles.cuh"

namespace lkv::cuda {

// What one warp of the role keeps. Lane 4g + c: slots g and g + 8 of the warp's 16, query rows 2c and 2c + 1, of which those of
// other heads have scores that nobody uses.
class KeyScorer {
public:
    float row_max[2] = {-INFINITY, -INFINITY};  // base 2, a whole number: sums of two warps differ by a power of two
    float row_sum[2] = {0.0f, 0.0f};

    // warp: 0 … 7
    __device__ KeyScorer(const SpecializedArgs& p, const RebuildTables& tables, const WorkItem& item,
                         const int32_t* rows_at, int warp)
        : p_(p),
          tables_(tables),
          warp_(warp),
          lane_(kept_lane()),
          head_(p.unit == 2 ? warp / 4 : 0),
          head_kv_(item.head_kv + head_) {
        const int c = lane_ % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 2 * c + i;
            mine_[i] = row < item.n_rows && item.few_head(row) == head_;
            token_[i] = mine_[i] ? item.few_token(row) : 0;
            slope_[i] = mine_[i] && p.alibi_slopes != nullptr
                            ? p.alibi_slopes[rows_at[row] - token_[i] * p.n_head] * log2_e
                            : 0.0f;
        }
        const int row = lane_ / 4;
        own_lanes_ = __ballot_sync(0xffffffffu, row < item.n_rows && item.few_head(row) == head_);
    }

    // What the queries see, which earlier kernels may write.
    __device__ void look() {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            my_pos_[i] = mine_[i] ? p_.q_pos[token_[i]] : 0;
            my_seq_[i] = mine_[i] ? p_.q_seq[token_[i]] : 0;
        }
    }

    // The first of the part's tiles that this warp scores.
    __device__ int first_tile() const { return p_.unit == 2 ? 0 : warp_ / 4; }

    // rows: of the part; expected: the lowest position of the window that is scored next, as far as is known before its latents; factor:
    // as load_factor has it. Absorbs: without the slow planes, see absorb.cuh; paired: see make_latents.cuh
    template <int B, bool Absorbs, bool paired>
    __device__ void run(const TileRows<B>& rows, int expected, SpecializedBarriers& barriers, const uint8_t* latents,
                        const uint8_t* notes, int note, int buffer_bits, int note_bits, uint8_t* factor,
                        TileWeights* weights) {
        const int n_tiles = rows.count;
        constexpr uint32_t a_step = 256;  // bytes of 16 channels
        constexpr uint32_t a_rows = 4 * B * a_step;
        constexpr uint32_t b_step = factor_step(B, Absorbs);
        constexpr int span = specialized_angle_span(B, Absorbs);
        uint8_t* const own_factor = factor + head_ * (tables_.n_tiles / product_tiles) * 4 * B * b_step;
        const auto a_at = static_cast<uint32_t>(__cvta_generic_to_shared(latents));
        const auto b_at = static_cast<uint32_t>(__cvta_generic_to_shared(own_factor));
        const int step = p_.unit == 2 ? 1 : 2;
        const int warpgroup = warp_ / 4;
        const int own_columns = p_.unit == 2 || column_sets(B) == 1 ? 0 : warpgroup;
        const auto notes_of = [&](int i) -> const TileNotes& {
            return *reinterpret_cast<const TileNotes*>(notes + Turn(i, note_bits).buffer * note);
        };
        Arrivals(&barriers.factor_arrives).wait(0);
        int about = INT_MIN / 2;  // the position that the absorbed columns are for, of their span on either side of it
        const float inverse_span = Absorbs ? 1.0f / static_cast<float>(p_.absorbed_span) : 0.0f;
        const auto all_warps = [&] { asm volatile("bar.sync %0, 128;" ::"r"(4 + warpgroup) : "memory"); };
        // Whether they are for the window of positions from `first` on.
        const auto reaches = [&](int first) {
            const auto past = static_cast<uint32_t>(first) - static_cast<uint32_t>(about);  // wraps where it is before
            return past + p_.absorbed_span <= static_cast<uint32_t>(2 * p_.absorbed_span - span);
        };
        const Peer peer(&barriers);
        const auto latents_are_used = [&](int tile, int buffer) {
            uint64_t* const barrier = &barriers.latents_used[buffer];
            __syncwarp();
            if (lane_ != 0) return;
            // who made them waits for both
            if (paired && (tile & 1) != peer.rank()) {
                arrive_there(peer(barrier));
            } else {
                Arrivals(barrier).arrive();
            }
        };
        // 128 dimensions of tile i, from tile j0 of the head's, or those that are not absorbed and the columns of those that are; meanwhile(k):
        // behind the start of product k
        constexpr int n_columns = Absorbs ? 8 * absorbed_block(column_sets(B)) : 16 * product_tiles;
        float keys[n_columns / 2];
        const auto multiply = [&](int i, int j0, auto&& meanwhile) __attribute__((always_inline)) {
            const Turn turn(i, buffer_bits);
            Arrivals(&barriers.latents_made[turn.buffer]).wait(turn.phase);
            const Operand a(a_at + static_cast<uint32_t>(turn.buffer) * 8 * a_rows, a_rows);
            const Operand b(b_at + static_cast<uint32_t>(j0 / product_tiles) * 4 * B * b_step);
            warpgroup_begin();
#pragma unroll
            for (uint32_t k = 0; k < 4 * B; k++) {
                warpgroup_mma(keys, a.at(k * a_step), b.at(k * b_step), k > 0);
                meanwhile(k);
            }
            warpgroup_commit();
        };
        int i = first_tile();  // the tile that is multiplied next
        int j0 = 0;            // from this tile of dimensions on
        int window = 0;        // and scored at the positions from this one on behind its lowest
        int now = -1;          // the tile whose weights are to be made, or none
        bool whole = false;    // whether every query sees every slot of it
        float s[4] = {};
        float power[2] = {};
        const auto see = [&]() __attribute__((always_inline)) {
            if (!Absorbs && p_.k_extras != 0) tables_.apply_norm(p_, power, s);
            mask(notes_of(now), whole, s);
            const float top[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
            const bool moved = top[0] > row_max[0] + stale_max || top[1] > row_max[1] + stale_max;
            if (__any_sync(0xffffffffu, moved)) raise_maxima(top);
        };
        const auto write_weights = [&]() __attribute__((always_inline)) {
            const Turn turn(now, weight_buffer_bits);
            Arrivals(&barriers.weights_used[turn.buffer]).wait(turn.phase ^ 1);
            weigh(s, weights[turn.buffer]);
            warp_arrives(&barriers.weights_made[turn.buffer]);
            if (lane_ == 0) Arrivals(&barriers.notes_used[Turn(now, note_bits).buffer]).arrive();
#pragma unroll
            for (float& x : s) x = 0.0f;
            power[0] = power[1] = 0.0f;
        };
#pragma unroll 1
        while (i < n_tiles) {
            if (Absorbs && !reaches(expected)) {
                about = min(expected, INT_MAX - p_.absorbed_span) + p_.absorbed_span;
                all_warps();  // are done with products of the columns that were there
                absorb<B>(p_, tables_, head_kv_, about, mine_, warp_ % 4,
                          own_factor + absorbed_block(own_columns) * 256, b_step);
                before_async_access();
                all_warps();
            }
            if constexpr (B == 4) {
                // sixteen products fill the queue of the tensor cores, which the warp would wait for: weights are made meanwhile
                multiply(i, j0, [&](uint32_t k) __attribute__((always_inline)) {
                    if (k == B - 1 && now >= 0) see();
                    if (k == 2 * B - 1 && now >= 0) write_weights();
                });
            } else {
                multiply(i, j0, [](uint32_t) {});
                if (now >= 0) {
                    see();
                    write_weights();
                }
            }
            const Turn latents_turn(i, buffer_bits);
            const Reach reach = barriers.reach[latents_turn.buffer];
            const bool all_tiles = Absorbs || j0 + product_tiles >= tables_.n_tiles;
            const int first = reach.empty() ? expected : reach.lowest + window;  // a tile without tokens is anywhere
            const bool one_window = reach.within(span);
            const Turn notes_turn(i, note_bits);
            const TileNotes& of = notes_of(i);
            Arrivals(&barriers.notes_made[notes_turn.buffer]).wait(notes_turn.phase);
            whole = of.whole != 0;
            const int past[2] = {of.past[slot(0)], of.past[slot(1)]};
            const auto* const turned = reinterpret_cast<const uint2*>(
                paired ? notes + of.turned * note + sizeof(TileNotes) : reinterpret_cast<const uint8_t*>(&of + 1));
            float far[2];  // from what the columns are for, of their span
#pragma unroll
            for (int h = 0; h < 2; h++) far[h] = static_cast<float>(reach.lowest - about + past[h]) * inverse_span;
            warpgroup_wait(keys);
            if (Absorbs && !reaches(first)) {
                // once more, with columns for where the tile is
                expected = first;
                now = -1;
                continue;
            }
            // slots that are not in the order of their positions take several passes
            const int next_window = one_window || !all_tiles ? INT_MAX : window_behind<span>(of, window);
            const bool last = all_tiles && next_window == INT_MAX;
            if (last) latents_are_used(i, latents_turn.buffer);
            float part[4] = {};
            if constexpr (Absorbs) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    constexpr int at = 4 * absorbed_block(0);
                    const float a = own_columns == 0 ? keys[at + e] : keys[at + 4 * (column_sets(B) - 1) + e];
                    const float b = __shfl_xor_sync(0xffffffffu, a, 2);  // column r ^ 4
                    part[e] = a + far[e / 2] * b;
                }
            }
            score<Absorbs, span>(of, turned, past, one_window, j0, window, keys, power, part);
#pragma unroll
            for (int e = 0; e < 4; e++) s[e] += part[e];
            if constexpr (Absorbs) {
                // the second of a pair's tiles is scored from where the first one is
                const int next = !last ? next_window : (paired ? (i & 1) * wide_angle_span : step * specialized_tile);
                expected = static_cast<int>(static_cast<uint32_t>(first - window) + static_cast<uint32_t>(next));
            }
            j0 = all_tiles ? 0 : j0 + product_tiles;
            if (all_tiles) window = last ? 0 : next_window;
            now = last ? i : -1;
            i = last ? i + step : i;
        }
        if (now >= 0) {
            see();
            write_weights();
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int o = 4; o < 32; o *= 2) row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], o);
        }
    }

private:
    static constexpr float log2_e = 1.4426950408889634f;

    // The tile's slot that is this lane's slot g (h = 0) or g + 8.
    __device__ int slot(int h) const { return 16 * (warp_ % 4) + lane_ / 4 + 8 * h; }

    // The first position behind the tile's lowest that is past this window; INT_MAX: none is.
    template <int span>
    __device__ static int window_behind(const TileNotes& of, int window) {
        const int lane = threadIdx.x % 32;
        int next = INT_MAX;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int past = of.past[lane + 32 * h];
            if (past - window >= span) next = min(next, past);
        }
        return __reduce_min_sync(0xffffffffu, next);
    }

    // part += the scores of the keys' 128 dimensions, or of those that are not absorbed; 0 for slots out of the window.
    template <bool Absorbs, int span, int n>
    __device__ void score(const TileNotes& of, const uint2* queries, const int (&past)[2], bool one_window, int j0,
                          int window, float (&keys)[n], float (&power)[2], float (&part)[4]) const {
        constexpr int room = Absorbs ? rebuilt_tiles : product_tiles;
        const int lane = lane_;
        const int n_tiles = Absorbs ? room : min(room, tables_.turned_tiles - j0);
        if (!Absorbs && p_.k_extras != 0) {
            float squares[2] = {};
#pragma unroll
            for (int j = 0; j < room; j++) {
                if (j >= n_tiles) break;
                float x[4];
                float y[4];
                split(keys, j, x, y);
                tables_.apply_extras(p_, j0 + j, tables_.bias + head_ * 16 * tables_.n_tiles, x, y, squares);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    keys[8 * j + e] = x[e];
                    keys[8 * j + 4 + e] = y[e];
                }
            }
            if (window == 0) {
                power[0] += squares[0];
                power[1] += squares[1];
            }
        }
        if (one_window) {
            const uint2* const turned = queries + j0 * 32 + lane;
            float more[4] = {};  // two sums, so that one product need not wait for another
#pragma unroll
            for (int j = 0; j < room; j++) {
                if (j == product_tiles / 2 && n_tiles == j) break;
                add_scores(keys, j, past, j0 + j, turned[j * 32], j % 2 == 0 ? part : more);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) part[e] += more[e];
            return;
        }
        const int delta[2] = {min(max(past[0] - window, 0), span - 1), min(max(past[1] - window, 0), span - 1)};
#pragma unroll
        for (int j = 0; j < room; j++) {
            if (j >= n_tiles) break;
            const float2 mine = tables_.query_angle(p_, 8 * (j0 + j) + lane % 8, of.lowest + window);
            add_scores(keys, j, delta, j0 + j, tables_.turned_queries(j0 + j, mine, 0), part);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (past[e / 2] - window != delta[e / 2]) part[e] = 0.0f;
        }
    }

    // scores += tile j of the keys, which is tile `at` of the head's, times queries.
    template <int n>
    __device__ void add_scores(const float (&keys)[n], int j, const int (&delta)[2], int at, uint2 queries,
                               float (&scores)[4]) const {
        const uint2 angle[2] = {tables_.angles_at(delta[0], at, lane_), tables_.angles_at(delta[1], at, lane_)};
        float x[4];
        float y[4];
        split(keys, j, x, y);
        uint32_t a[4];
        RebuildTables::turn_keys(x, y, angle, a);
        mma(scores, a, queries.x, queries.y);
    }

    template <int n>
    __device__ static void split(const float (&keys)[n], int j, float (&x)[4], float (&y)[4]) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[e] = keys[8 * j + e];
            y[e] = keys[8 * j + 4 + e];
        }
    }

    // Scores as powers of two; what a query does not see, and other heads' queries: -INFINITY. ALiBi's bias.
    __device__ void mask(const TileNotes& of, bool whole, float (&s)[4]) const {
        const float scale = p_.scale * log2_e;
        if (whole) {
#pragma unroll
            for (int e = 0; e < 4; e++) s[e] = mine_[e % 2] ? s[e] * scale : -INFINITY;
            return;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int slot_pos = of.lowest + of.past[slot(h)];
            const uint64_t slot_seq = of.seq[slot(h)];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int distance = my_pos_[i] - slot_pos;
                const bool seen = mine_[i] && (slot_seq >> my_seq_[i] & 1) != 0 && distance >= 0 &&
                                  (p_.window == 0 || distance < p_.window);
                float& x = s[2 * h + i];
                x = seen ? x * scale - slope_[i] * static_cast<float>(distance) : -INFINITY;
            }
        }
    }

    // Softmax weights of this tile, and what the warps that sum need to know of it.
    __device__ void weigh(const float (&s)[4], TileWeights& to) {
        const int c = lane_ % 4;
        const float base[2] = {row_max[0] == -INFINITY ? 0.0f : row_max[0],
                               row_max[1] == -INFINITY ? 0.0f : row_max[1]};
        uint32_t of[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const __half2 weight =
                __floats2half2_rn(power_of_two(s[2 * h] - base[0]), power_of_two(s[2 * h + 1] - base[1]));
            const float2 as_used = __half22float2(weight);  // the weights as the product sees them
            row_sum[0] += as_used.x;
            row_sum[1] += as_used.y;
            of[h] = transposed(bits(weight));
        }
        if ((own_lanes_ >> lane_ & 1) != 0) to.of[warp_ % 4][lane_] = make_uint2(of[0], of[1]);
        if (lane_ < 4) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (mine_[i]) to.base[warp_ % 4][2 * c + i] = row_max[i];
            }
        }
    }

    // To what is the largest of the warp's slots. top: of this lane's
    __device__ void raise_maxima(const float (&top)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float of = top[i];
#pragma unroll
            for (int o = 4; o < 32; o *= 2) of = fmaxf(of, __shfl_xor_sync(0xffffffffu, of, o));
            of = fmaxf(row_max[i], ceilf(of));
            if (of > row_max[i]) row_sum[i] *= exp2f(row_max[i] - of);
            row_max[i] = of;
        }
    }

    const SpecializedArgs& p_;
    const RebuildTables& tables_;
    int warp_;
    int lane_;
    int head_;  // of the item's
    int head_kv_;
    int token_[2];  // of query rows 2c and 2c + 1, as what follows
    int my_pos_[2];
    int my_seq_[2];
    float slope_[2];
    bool mine_[2];
    uint32_t own_lanes_;  // those with g one of the head's query rows
};

}  // namespace lkv::cuda
