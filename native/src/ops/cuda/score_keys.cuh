// The specialized kernel's second role: keys of 64 slots from their latents, 128 dimensions at once (warpgroup.cuh), turned by their
// positions (rebuild_tables.cuh), times the queries; then softmax weights for the warps that sum. Two warpgroups work at different
// tiles or, where KV heads share their latents, for different heads, so that one multiplies while the other turns keys.
#pragma once

#include <climits>

#include "ops/cuda/mma.cuh"
#include "ops/cuda/rebuild_tables.cuh"
#include "ops/cuda/specialized_tiles.cuh"
#include "ops/cuda/warpgroup.cuh"

namespace lkv::cuda {

// What one warp of the role keeps. Lane 4g + c: slots g and g + 8 of the warp's 16, query rows 2c and 2c + 1, of which those of
// other heads have scores that nobody uses.
class KeyScorer {
public:
    float row_max[2] = {-INFINITY, -INFINITY};  // base 2, a whole number: sums of two warps differ by a power of two
    float row_sum[2] = {0.0f, 0.0f};

    // warp: 0 … 7
    __device__ KeyScorer(const AttnArgs& p, const RebuildTables& tables, const WorkItem& item, const int32_t* rows_at,
                         int warp)
        : p_(p), tables_(tables), warp_(warp), head_(p.unit == 2 ? warp / 4 : 0) {
        const int c = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 2 * c + i;
            mine_[i] = row < item.n_rows && row / item.rep % p.unit == head_;
            const int at = mine_[i] ? rows_at[row] : 0;
            const int token = at / p.n_head;
            my_pos_[i] = mine_[i] ? p.q_pos[token] : 0;
            my_seq_[i] = mine_[i] ? uint64_t{1} << p.q_seq[token] : 0;
            slope_[i] = mine_[i] && p.alibi_slopes != nullptr ? p.alibi_slopes[at - token * p.n_head] * log2_e : 0.0f;
        }
    }

    // n_tiles: of the part; factor: pack_k_b_cores of the item's KV heads
    template <int B>
    __device__ void run(int n_tiles, SpecializedBarriers& barriers, const uint8_t* latents, const uint8_t* notes,
                        int note, int buffer_bits, int note_bits, const uint8_t* factor, TileWeights* weights) {
        constexpr uint32_t a_step = specialized_tile * 16 * 2;  // bytes of 16 channels
        constexpr uint32_t b_step = product_tiles * 16 * 16 * 2;
        const auto a_at = static_cast<uint32_t>(__cvta_generic_to_shared(latents));
        const auto b_at =
            static_cast<uint32_t>(__cvta_generic_to_shared(factor + head_ * B * 64 * 16 * tables_.n_tiles * 2));
        Arrivals(&barriers.factor_arrives).wait(0);
        // 128 dimensions of tile i, from tile j0 of the head's; meanwhile(k): behind the start of product k
        float keys[8 * product_tiles];
        const auto multiply = [&](int i, int j0, auto&& meanwhile) __attribute__((always_inline)) {
            const Turn turn(i, buffer_bits);
            Arrivals(&barriers.latents_made[turn.buffer]).wait(turn.phase);
            const Operand a(a_at + static_cast<uint32_t>(turn.buffer) * 4 * B * a_step);
            const Operand b(b_at + static_cast<uint32_t>(j0 / product_tiles) * 4 * B * b_step);
            warpgroup_begin();
#pragma unroll
            for (uint32_t k = 0; k < 4 * B; k++) {
                warpgroup_mma(keys, a.at(k * a_step), b.at(k * b_step), k > 0);
                meanwhile(k);
            }
            warpgroup_commit();
        };
        const int step = p_.unit == 2 ? 1 : 2;
        int i = p_.unit == 2 ? 0 : warp_ / 4;
        int j0 = 0;
        float s[4] = {};
        float power[2] = {};
        const auto nothing = [](uint32_t) {};
        if (i < n_tiles) multiply(i, j0, nothing);
#pragma unroll 1
        while (i < n_tiles) {
            const Turn turn(i, note_bits);
            const auto& of = *reinterpret_cast<const TileNotes*>(notes + turn.buffer * note);
            const bool last = j0 + product_tiles >= tables_.n_tiles;
            const int now = i;
            warpgroup_wait(keys);
            if (last) warp_arrives(&barriers.latents_used[Turn(i, buffer_bits).buffer]);
            if (j0 == 0) Arrivals(&barriers.notes_made[turn.buffer]).wait(turn.phase);
            const uint32_t sight = of.sight;
            score(of, sight, j0, keys, power, s);
            j0 = last ? 0 : j0 + product_tiles;
            i = last ? i + step : i;
            const auto see = [&]() __attribute__((always_inline)) {
                if (p_.k_extras != 0) tables_.apply_norm(p_, power, s);
                mask(of, sight, s);
                const float top[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
                const bool moved = top[0] > row_max[0] + stale_max || top[1] > row_max[1] + stale_max;
                if (__any_sync(0xffffffffu, moved)) raise_maxima(top);
            };
            const auto write_weights = [&]() __attribute__((always_inline)) {
                const Turn weights_turn(now, weight_buffer_bits);
                Arrivals(&barriers.weights_used[weights_turn.buffer]).wait(weights_turn.phase ^ 1);
                weigh(s, weights[weights_turn.buffer]);
                warp_arrives(&barriers.weights_made[weights_turn.buffer]);
                if (threadIdx.x % 32 == 0) Arrivals(&barriers.notes_used[turn.buffer]).arrive();
            };
            if (B == 4 && i < n_tiles) {
                // sixteen products fill the queue of the tensor cores, which the warp would wait for: weights are made meanwhile
                multiply(i, j0, [&](uint32_t k) __attribute__((always_inline)) {
                    if (k == B - 1 && last) see();
                    if (k == 2 * B - 1 && last) write_weights();
                });
            } else {
                if (i < n_tiles) multiply(i, j0, nothing);
                if (last) {
                    see();
                    write_weights();
                }
            }
            if (!last) continue;
#pragma unroll
            for (float& x : s) x = 0.0f;
            power[0] = power[1] = 0.0f;
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
    __device__ int slot(int h) const { return 16 * (warp_ % 4) + static_cast<int>(threadIdx.x % 32) / 4 + 8 * h; }

    // s += the scores of 128 dimensions.
    __device__ void score(const TileNotes& of, uint32_t sight, int j0, float (&keys)[8 * product_tiles],
                          float (&power)[2], float (&s)[4]) const {
        const int lane = threadIdx.x % 32;
        const int n_tiles = min(product_tiles, tables_.used_tiles - j0);
        if (p_.k_extras != 0) {
#pragma unroll
            for (int j = 0; j < product_tiles; j++) {
                if (j >= n_tiles) break;
                float x[4];
                float y[4];
                split(keys, j, x, y);
                tables_.apply_extras(p_, j0 + j, tables_.bias + head_ * 16 * tables_.n_tiles, x, y, power);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    keys[8 * j + e] = x[e];
                    keys[8 * j + 4 + e] = y[e];
                }
            }
        }
        const int past[2] = {of.past[slot(0)], of.past[slot(1)]};
        if ((sight & sight_one_span) != 0) {
            // slots in the order of their positions, as almost always
            const auto* const turned = reinterpret_cast<const uint2*>(&of + 1) + j0 * 32 + lane;
            float part[2][4] = {};  // two sums, so that one product need not wait for another
#pragma unroll
            for (int j = 0; j < product_tiles; j++) {
                if (j == product_tiles / 2 && n_tiles == j) break;
                add_scores(keys, j, past, j0 + j, turned[j * 32], part[j % 2]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) s[e] += part[0][e] + part[1][e];
            return;
        }
        // others take several passes
#pragma unroll 1
        for (int base = 0; base != INT_MAX;) {
            const int delta[2] = {min(max(past[0] - base, 0), angle_span - 1),
                                  min(max(past[1] - base, 0), angle_span - 1)};
            float part[4] = {};
#pragma unroll
            for (int j = 0; j < product_tiles; j++) {
                if (j >= n_tiles) break;
                const float2 mine = tables_.query_angle(p_, 8 * (j0 + j) + lane % 8, of.lowest + base);
                add_scores(keys, j, delta, j0 + j, tables_.turned_queries(j0 + j, mine, 0), part);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) s[e] += past[e / 2] - base == delta[e / 2] ? part[e] : 0.0f;
            // the next position that no pass has reached
            int next = INT_MAX;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int of_lane = of.past[lane + 32 * h];
                if (of_lane - base >= angle_span) next = min(next, of_lane);
            }
            base = __reduce_min_sync(0xffffffffu, next);
        }
    }

    // scores += tile j of the keys, which is tile `at` of the head's, times queries.
    __device__ void add_scores(const float (&keys)[8 * product_tiles], int j, const int (&delta)[2], int at,
                               uint2 queries, float (&scores)[4]) const {
        const uint2 angle[2] = {tables_.angles_at(delta[0], at), tables_.angles_at(delta[1], at)};
        float x[4];
        float y[4];
        split(keys, j, x, y);
        uint32_t a[4];
        RebuildTables::turn_keys(x, y, angle, a);
        mma(scores, a, queries.x, queries.y);
    }

    __device__ static void split(const float (&keys)[8 * product_tiles], int j, float (&x)[4], float (&y)[4]) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[e] = keys[8 * j + e];
            y[e] = keys[8 * j + 4 + e];
        }
    }

    // Scores as powers of two; what a query does not see, and other heads' queries: -INFINITY. ALiBi's bias.
    __device__ void mask(const TileNotes& of, uint32_t sight, float (&s)[4]) const {
        const float scale = p_.scale * log2_e;
        if ((sight & sight_whole) != 0) {
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
                const bool seen = mine_[i] && (slot_seq & my_seq_[i]) != 0 && distance >= 0 &&
                                  (p_.window == 0 || distance < p_.window);
                float& x = s[2 * h + i];
                x = seen ? x * scale - slope_[i] * static_cast<float>(distance) : -INFINITY;
            }
        }
    }

    // Softmax weights of this tile, and what the warps that sum need to know of it.
    __device__ void weigh(const float (&s)[4], TileWeights& to) {
        const int lane = threadIdx.x % 32;
        const int c = lane % 4;
        const float base[2] = {row_max[0] == -INFINITY ? 0.0f : row_max[0],
                               row_max[1] == -INFINITY ? 0.0f : row_max[1]};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const __half2 weight =
                __floats2half2_rn(power_of_two(s[2 * h] - base[0]), power_of_two(s[2 * h + 1] - base[1]));
            const float2 as_used = __half22float2(weight);  // the weights as the product sees them
            row_sum[0] += as_used.x;
            row_sum[1] += as_used.y;
            if (mine_[0]) to.of[2 * c][slot(h)] = static_cast<uint16_t>(bits(weight));
            if (mine_[1]) to.of[2 * c + 1][slot(h)] = static_cast<uint16_t>(bits(weight) >> 16);
        }
        if (lane < 4) {
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

    const AttnArgs& p_;
    const RebuildTables& tables_;
    int warp_;
    int head_;  // of the item's
    int my_pos_[2];
    uint64_t my_seq_[2];
    float slope_[2];
    bool mine_[2];
};

}  // namespace lkv::cuda
