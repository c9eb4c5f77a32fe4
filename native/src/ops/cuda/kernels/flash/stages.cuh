// The stages of the flash kernel. All is inlined; arrays lie in registers once loops are unrolled.
#pragma once

#include "ops/cuda/gpu/bulk_copy.cuh"
#include "ops/cuda/gpu/warpgroup.cuh"
#include "ops/cuda/kernels/flash/layout.h"
#include "ops/cuda/rows/copy.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// A region's slots in use, from the head's first byte.
struct FlashRegion {
    const uint8_t* k;
    const uint8_t* v;
    const uint64_t* seq;
    const int32_t* pos;
    int64_t k_page;  // bytes from a page of slots to the next one
    int64_t v_page;
    int64_t k_step;  // bytes from slot to slot
    int64_t v_step;
    int n_slots;
};

struct FlashState {
    float top[2] = {-INFINITY, -INFINITY};  // powers of two
    float sums[2] = {};                     // of this lane's weights
};

template <int D, bool IN_TILES>
struct FlashBlock {
    static constexpr FlashStage stage{D, IN_TILES};
    static constexpr int n_pieces = D / 8;  // of 16 bytes
    static constexpr int slots = flash_slots(D);
    static constexpr uint64_t all_slots = ~uint64_t{0} >> (64 - slots);
    static constexpr int ahead = flash_stages - 2;
    using Rows = QueryRow[2];  // g and g + 8 of its warp's 16
    using Queries = uint32_t[D / 16][4];
    using Scores = float[slots / 2];  // [slots / 8][4]
    using Weights = uint32_t[slots / 16][4];
    using Sums = float[D / 2];  // [channels / 8][4]

    const FlashArgs& p;
    const WorkItem& item;
    const Parts& parts;
    uint8_t* const stages;
    Sight& sight;
    FlashRegion* const regions;
    uint64_t* const arrivals;  // of tiles
    const int first_row;
    const int split;
    const int tile_begin = parts.begin(split);
    const int n_tiles = parts.begin(split + 1) - tile_begin;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const int row0 = first_row + thread / 32 * 16 + g;
    const int window = p.window == 0 ? INT_MAX : p.window;

    __device__ uint8_t* tile_at(int t) const { return stages + t % flash_stages * stage.total; }
    __device__ static uint64_t* seq_of(uint8_t* tile) { return reinterpret_cast<uint64_t*>(tile + 2 * stage.side); }
    __device__ static int32_t* pos_of(uint8_t* tile) { return reinterpret_cast<int32_t*>(seq_of(tile) + slots); }
    // Where products read a tile's K or V. next_rows, next_channels: as Operand has them
    __device__ static Operand operand(const uint8_t* side, int next_rows, int next_channels) {
        return Operand(static_cast<uint32_t>(__cvta_generic_to_shared(side)), static_cast<uint32_t>(next_rows),
                       static_cast<uint32_t>(next_channels));
    }

    // What the rows see, and where regions lie. By all threads.
    __device__ __forceinline__ void set_up() const {
        if (thread == 0) sight = sees_nothing;
        if constexpr (IN_TILES) {
            if (thread < flash_stages) Arrivals(arrivals + thread).init();
        }
        if (thread < p.n_regions) {
            const RegionArgs& region = p.regions[thread];
            regions[thread] = {region.k_rows + region.k_groups[item.k_group].first,
                               region.v_rows + region.v_groups[item.v_group].first,
                               region.seq,
                               region.pos,
                               region.k_page,
                               region.v_page,
                               region.k_row_bytes,
                               region.v_row_bytes,
                               p.n_slots[thread]};
        }
        __syncthreads();
        if (thread < flash_rows && first_row + thread < item.n_rows) {
            add_token(sight, p, (first_row + thread) / item.unit_heads);
        }
        __syncthreads();
    }

    __device__ __forceinline__ void read_rows(Rows& of, Queries& q) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = row0 + 8 * i;
            const bool exists = row < item.n_rows;
            const int at = exists ? item.row_at(p, row) : -1;
            of[i] = load_query_row(p, at);
            const float* const from = p.q + static_cast<int64_t>(max(at, 0)) * p.q_width + 2 * c;
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float2 x =
                        exists ? *reinterpret_cast<const float2*>(from + 16 * k + 8 * half) : make_float2(0.0f, 0.0f);
                    q[k][2 * half + i] = bits(__floats2half2_rn(x.x, x.y));
                }
            }
        }
    }

    // Copies of a tile, a group of them for each thread; none behind the last tile.
    __device__ __forceinline__ void issue(int t) const {
        if constexpr (IN_TILES) {
            if (t >= n_tiles || thread != 0) return;
            const FlashTiles from(p);
            const RegionArgs& region = p.regions[0];
            const int tile = tile_begin + t;
            const int64_t at = tile * from.tile + item.head_kv * from.head;
            uint8_t* const to = tile_at(t);
            const Arrivals arrival(arrivals + t % flash_stages);
            arrival.announce(static_cast<uint32_t>(stage.total));
            arrival.copy(to, region.k_rows + at, stage.side);
            arrival.copy(to + stage.side, region.v_rows + at, stage.side);
            arrival.copy(seq_of(to), region.seq + tile * slots, slots * 8);
            arrival.copy(pos_of(to), region.pos + tile * slots, slots * 4);
            return;
        }
        if (t < n_tiles) {
            const int r = parts.region_of(tile_begin + t);
            const FlashRegion& from = regions[r];
            const int first = (tile_begin + t - parts.tiles_before(r)) * slots;
            const int n = min(slots, from.n_slots - first);
            uint8_t* const to = tile_at(t);
            if (thread < slots) {
                copy_mark(seq_of(to), pos_of(to), from.seq + first, from.pos + first, thread, n);
            }
            constexpr int down = n_threads / n_pieces;
            const int piece = thread % n_pieces;
            const uint8_t* const k = from.k + row_offset(first, from.k_page, from.k_step) + 16 * piece;
            const uint8_t* const v = from.v + row_offset(first, from.v_page, from.v_step) + 16 * piece;
            uint8_t* const column = to + piece * stage.piece;
#pragma unroll
            for (int i = 0; i < slots / down; i++) {
                const int slot = thread / n_pieces + down * i;
                const int64_t at = min(slot, n - 1);
                copy_async<16>(column + 16 * slot, k + at * from.k_step);
                copy_async<16>(column + stage.side + 16 * slot, v + at * from.v_step);
            }
        }
        copies_commit();
    }

    // Free slots hold anything, NaN too, and a weight of 0 would not hide that. By all threads.
    __device__ __forceinline__ void clear_free(uint8_t* tile, uint64_t used) const {
        for (int i = thread; i < slots * n_pieces; i += n_threads) {
            const int slot = i % slots;
            if ((used >> slot & 1) != 0) continue;
            *reinterpret_cast<uint4*>(tile + stage.side + i / slots * stage.piece + 16 * slot) = make_uint4(0, 0, 0, 0);
        }
        before_async_access();
        __syncthreads();
    }

    // Waits for a tile. Of those two before it and earlier no products are under way. By all threads.
    __device__ __forceinline__ void arrive(int t) const {
        if constexpr (IN_TILES) {
            Arrivals(arrivals + t % flash_stages).wait(t / flash_stages % 2);
        } else {
            copies_wait(ahead - 1);
            before_async_access();
        }
        __syncthreads();
    }
    // Behind that: copies of a later tile, and who sees this one, whose values then are all fit to be multiplied.
    __device__ __forceinline__ Seen look(int t) const {
        issue(t + ahead);
        uint8_t* const tile = tile_at(t);
        const auto mark = [&](int s, int& pos) {
            pos = pos_of(tile)[s];
            return seq_of(tile)[s];
        };
        uint64_t used;
        const Seen seen = judge<slots>(sight, window, lane, mark, used);
        if (seen != Seen::by_none && used != all_slots) clear_free(tile, used);
        return seen;
    }

    // Begins the scores of a tile.
    __device__ __forceinline__ void begin_scores(int t, const Queries& q, Scores& s) const {
        const Operand k = operand(tile_at(t), 128, stage.piece);
        warpgroup_begin();
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            warpgroup_mma_columns(s, q[i], k.at(static_cast<uint32_t>(2 * i * stage.piece)), i > 0);
        }
        warpgroup_commit();
    }
    __device__ __forceinline__ void begin_values(int t, const Weights& w, Sums& acc) const {
        const Operand v = operand(tile_at(t) + stage.side, stage.piece, 128);
        warpgroup_begin();
#pragma unroll
        for (int i = 0; i < slots / 16; i++) {
            if constexpr (D <= 128) {
                warpgroup_mma(acc, w[i], v.at(static_cast<uint32_t>(256 * i)), true);
            } else {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const auto at = static_cast<uint32_t>(256 * i + half * n_pieces / 2 * stage.piece);
                    warpgroup_mma(*reinterpret_cast<float (*)[64]>(acc + 64 * half), w[i], v.at(at), true);
                }
            }
        }
        warpgroup_commit();
    }

    // -INFINITY where a row sees no slot, and slopes; what is left to multiply with is returned.
    __device__ __forceinline__ float mask(Seen seen, int t, const Rows& rows, Scores& s) const {
        const float scale = p.scale * log2_e;
        if (seen == Seen::by_all && p.alibi_slopes == nullptr) return scale;
        const uint64_t* const seq = seq_of(tile_at(t));
        const int32_t* const pos = pos_of(tile_at(t));
#pragma unroll
        for (int i = 0; i < slots / 2; i++) {
            const int slot = i / 4 * 8 + 2 * c + i % 2;
            const int row = i / 2 % 2;
            const int distance = rows[row].pos - pos[slot];
            const bool visible = (seq[slot] & rows[row].seq) != 0 && distance >= 0 && distance < window;
            s[i] = visible ? s[i] * scale - rows[row].slope * static_cast<float>(distance) : -INFINITY;
        }
        return 1.0f;
    }

    // Scores become weights, in f32, and their sums are added up. by: what sums so far are multiplied with, for the new maximum
    __device__ __forceinline__ void weigh(float scale, Scores& s, FlashState& state, float (&by)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = -INFINITY;
#pragma unroll
            for (int i = 0; i < slots / 4; i++) top = fmaxf(top, s[i / 2 * 4 + 2 * r + i % 2]);
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)) * scale;
            const float higher = top > state.top[r] + stale_max ? top : state.top[r];
            const float base = higher == -INFINITY ? 0.0f : higher;
            by[r] = power_of_two(state.top[r] - base);
            state.top[r] = higher;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < slots / 4; i++) {
                float& x = s[i / 2 * 4 + 2 * r + i % 2];
                x = power_of_two(fmaf(x, scale, -base));
                sum += x;
            }
            state.sums[r] = state.sums[r] * by[r] + sum;
        }
    }
    // Weights as products read them.
    __device__ __forceinline__ void pack(const Scores& s, Weights& w) const {
#pragma unroll
        for (int i = 0; i < slots / 4; i++) w[i / 4][i % 4] = bits(__floats2half2_rn(s[2 * i], s[2 * i + 1]));
    }

    // The weights of the first tile of several that rows see.
    __device__ __forceinline__ void begin(int t, Seen seen, const Rows& rows, const Queries& q, FlashState& state,
                                          Scores& s, Sums& acc, Weights& w) const {
        begin_scores(t, q, s);
        warpgroup_wait_all();
        hold(s);
        float by[2];
        weigh(mask(seen, t, rows, s), s, state, by);
        rescale(by, acc);
        pack(s, w);
    }
    // The values of a tile, and beside them the weights of the next one, if any row sees it.
    __device__ __forceinline__ Seen step(int t, const Rows& rows, const Queries& q, FlashState& state, Scores& s,
                                         Sums& acc, Weights& w) const {
        arrive(t + 1);
        begin_scores(t + 1, q, s);
        begin_values(t, w, acc);
        const Seen next = look(t + 1);
        warpgroup_wait_but<1>();
        hold(s);
        float by[2] = {1.0f, 1.0f};
        if (next != Seen::by_none) weigh(mask(next, t + 1, rows, s), s, state, by);
        warpgroup_wait_all();
        hold(acc);
        hold(w);
        rescale(by, acc);
        pack(s, w);
        return next;
    }
    // A maximum rarely moves once a few tiles have passed.
    __device__ __forceinline__ void rescale(const float (&by)[2], Sums& acc) const {
        if (!__any_sync(0xffffffffu, by[0] != 1.0f || by[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < D / 2; i++) acc[i] *= by[i / 2 % 2];
    }

    __device__ __forceinline__ void walk(const Rows& rows, const Queries& q, FlashState& state, Sums& acc) const {
        for (int t = 0; t < ahead; t++) issue(t);
        Scores s = {};
        Weights w;
#pragma unroll 1
        for (int t = 0; t < n_tiles; t++) {
            arrive(t);
            const Seen seen = look(t);
            if (seen == Seen::by_none) continue;
            begin(t, seen, rows, q, state, s, acc, w);
            bool more = true;
#pragma unroll 1
            while (more && t + 1 < n_tiles) more = step(t++, rows, q, state, s, acc, w) != Seen::by_none;
            if (!more) continue;
            begin_values(t, w, acc);
            warpgroup_wait_all();
            hold(acc);
            hold(w);
        }
        copies_wait(0);
    }

    // Element 4n + e of the sums: channel 8n + 2c + e % 2 of row g + e / 2 · 8.
    __device__ __forceinline__ void take_sums(FlashState& state, Sums& acc) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (row0 + 8 * r >= item.n_rows) continue;
            const int64_t row = item.row_at(p, row0 + 8 * r);
            const float2 before = p.carry.ml[row];
            state.top[r] = before.x;
            state.sums[r] = c == 0 ? before.y : 0.0f;
            const float* const from = p.out + row * D + 2 * c;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                const float2 x = *reinterpret_cast<const float2*>(from + 8 * n);
                acc[4 * n + 2 * r] = x.x;
                acc[4 * n + 2 * r + 1] = x.y;
            }
        }
    }
    __device__ __forceinline__ void leave(const FlashState& state, const Sums& acc) const {
        const bool carried = p.carry.behind != 0;
        const bool whole = carried || (parts.count == 1 && p.leaves != Leaves::parts);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = state.sums[r];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (row0 + 8 * r >= item.n_rows) continue;
            const int64_t row = item.row_at(p, row0 + 8 * r);
            const int64_t at = static_cast<int64_t>(split) * p.n_tokens * p.n_head + row;
            const float by = whole && !carried ? (sum > 0.0f ? 1.0f / sum : 0.0f) : 1.0f;
            float* const to = (whole ? p.out + row * D : p.partial + at * D) + 2 * c;
            if (c == 0 && carried) p.carry.ml[row] = make_float2(state.top[r], sum);
            if (c == 0 && !whole) reinterpret_cast<float2*>(p.partial_ml)[at] = make_float2(state.top[r], sum);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                *reinterpret_cast<float2*>(to + 8 * n) =
                    make_float2(acc[4 * n + 2 * r] * by, acc[4 * n + 2 * r + 1] * by);
            }
        }
    }
};

}  // namespace lkv::cuda
