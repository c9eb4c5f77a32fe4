// The stages of the prefill kernel. All is inlined. Arrays, which lie in registers once loops are unrolled, are no members of what has single
// values: the compiler would keep these in memory until then, and unroll less.
#pragma once

#include <climits>

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/kernels/prefill/layout.h"
#include "ops/cuda/kernels/prefill/tile.cuh"
#include "ops/cuda/rows/copy.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// Waits for `threads` threads of the thread block, those that only arrive included.
__device__ inline void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Two stored channels of a query row as K's tile orders them: word w of 16 channels.
__device__ inline uint32_t query_word(const PrefillArgs& p, const float* row, int k16, int w) {
    return query_pair(row, p.q_width, 16 * k16 + pair_channel(w));
}

struct PrefillState {
    float top[2] = {-INFINITY, -INFINITY};
    float sums[4] = {};  // of the weights as the product sees them: a column of ones beside V
};

// Where everything lies in shared memory.
struct PrefillShared {
    Chunk* chunks;
    uint8_t* run_ends;   // of chunks
    GroupTable* groups;  // [n_regions][K, V]
    Sight* sight;
    PrefillRegion* ways;  // [n_regions]
    PrefillMeta* meta;    // [2]
    uint8_t* queries;
    uint8_t* weights;
    float* maxima;  // [R][WC]
    uint8_t* tiles;
    uint8_t* stages;

    __device__ __forceinline__ PrefillShared(const PrefillArgs& p, const PrefillLayout& plan, uint8_t* shared)
        : chunks(reinterpret_cast<Chunk*>(shared)),
          run_ends(shared + plan.run_ends),
          groups(reinterpret_cast<GroupTable*>(shared + plan.groups)),
          sight(reinterpret_cast<Sight*>(shared + plan.chunks)),
          ways(reinterpret_cast<PrefillRegion*>(sight + 1)),
          meta(reinterpret_cast<PrefillMeta*>(ways + max_regions)),
          queries(shared + plan.chunks + plan.meta),
          weights(queries + plan.queries),
          maxima(reinterpret_cast<float*>(weights + plan.weights)),
          tiles(reinterpret_cast<uint8_t*>(maxima) + plan.maxima),
          stages(tiles + p.buffers * plan.tile) {}
};

// WC: warps side by side over V's channels. KQ: 16-channel steps of queries in registers, 0: they lie in shared memory.
// NV: 16-channel blocks of V a warp. TILE: slots.
template <int WC, int KQ, int NV, int TILE>
struct PrefillBlock {
    static constexpr bool apart = WC == 1;  // tiles are made by warps of their own
    static constexpr int R = 128 / WC;
    static constexpr int NS = TILE < 8 * WC ? 1 : TILE / 8 / WC;  // 8-slot tiles of scores a warp
    static constexpr int scorers = TILE / 8 / NS;                 // of WC warps side by side, those that have scores
    static constexpr int makers = apart ? n_maker_warps : n_warps;
    static constexpr int together = apart ? TILE / 32 : 1;
    static constexpr int everyone = prefill_threads(WC);
    // named barriers
    static constexpr int full = 1;    // + buffer: a tile is made
    static constexpr int empty = 3;   // + buffer: a tile is done with
    static constexpr int making = 5;  // the makers alone
    static_assert(apart == (KQ > 0) && scorers <= WC);

    const PrefillArgs& p;
    const PrefillLayout& plan;
    const PrefillShared& shared;
    const WorkItem& item;
    const Parts& parts;
    const int first_row;
    const int split;
    const int tile_begin = parts.begin(split);
    const int n_tiles = parts.begin(split + 1) - tile_begin;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const int chunks_per_region = 4 * (p.k_blocks + p.v_blocks);
    // of the makers
    const int maker_thread = apart ? threadIdx.x - 32 * n_warps : threadIdx.x;
    const int maker = maker_thread / 32;
    const int window = p.window == 0 ? INT_MAX : p.window;
    const bool in_keys = !apart && p.values_at > 0;  // V
    int issue_stage = 0;
    int source_stage = 0;
    Sight view = {};  // what the thread block's rows see between them
    // of the others: 16 query rows, slots and channels
    const int group = warp / WC;
    const int part = warp % WC;
    const bool scores = scorers == WC || part < scorers;
    const int row0 = first_row + 16 * group + g;
    // this lane's row of a 16 x 16 block: of K as operand b, of V transposed
    const int k_row = lane % 8 + lane / 16 * 8;
    const int k_half = lane / 8 % 2 * 16;
    const int v_row = lane % 16;
    const int v_half = lane / 16 * 16;
    const int weights_pitch = 2 * TILE + 16;

    using Rows = QueryRow[2];  // g and g + 8 of its warp's 16
    using Queries = uint32_t[KQ == 0 ? 1 : KQ][4];
    using Sums = float[NV][2][4];

    // Tables, and what the rows see. By all threads.
    __device__ __forceinline__ void set_up() const {
        if (threadIdx.x == 0) *shared.sight = sees_nothing;
        load_chunks<prefill_threads(WC)>(p, item, shared.chunks);
        if (static_cast<int>(threadIdx.x) < 2 * p.n_regions) {
            const RegionArgs& region = p.regions[threadIdx.x / 2];
            shared.groups[threadIdx.x] =
                threadIdx.x % 2 == 0 ? region.k_groups[item.k_group] : region.v_groups[item.v_group];
        }
        // channels that no row has are multiplied too: zeros, not what was left there
        for (int i = threadIdx.x; i < p.buffers * plan.tile / 16; i += prefill_threads(WC)) {
            reinterpret_cast<uint4*>(shared.tiles)[i] = make_uint4(0, 0, 0, 0);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < p.n_regions * chunks_per_region; i += prefill_threads(WC)) {
            const int j = i % chunks_per_region;
            const int begin = j < 4 * p.k_blocks ? 0 : 4 * p.k_blocks;
            const int end = j < 4 * p.k_blocks ? 4 * p.k_blocks : chunks_per_region;
            int stop = j + 1;
            while (stop < end && shared.chunks[i - j + stop].kind == shared.chunks[i].kind) stop++;
            shared.run_ends[i] = static_cast<uint8_t>(stop - begin);
        }
        if (threadIdx.x < R && first_row + static_cast<int>(threadIdx.x) < item.n_rows) {
            add_token(*shared.sight, p, (first_row + threadIdx.x) / item.unit_heads);
        }
        if (static_cast<int>(threadIdx.x) < p.n_regions) {
            const RegionArgs& region = p.regions[threadIdx.x];
            const GroupTable& k = shared.groups[2 * threadIdx.x];
            const GroupTable& v = shared.groups[2 * threadIdx.x + 1];
            PrefillRegion& way = shared.ways[threadIdx.x];
            way.n_slots = p.n_slots[threadIdx.x];
            way.staged = p.stages > 0 && static_cast<int>(k.bytes) <= p.k_pitch &&
                         (in_keys || static_cast<int>(v.bytes) <= p.v_pitch);
            way.k_step =
                way.staged ? tile_pitch(p.k_pitch, region.k_row_bytes, k) : static_cast<int>(region.k_row_bytes);
            way.v_step = way.staged && !in_keys ? tile_pitch(p.v_pitch, region.v_row_bytes, v)
                                                : static_cast<int>(region.v_row_bytes);
        }
        if constexpr (!apart) {
            const int per_row = 8 * plan.k16;
            for (int i = threadIdx.x; i < R * per_row; i += prefill_threads(WC)) {
                const int row = i / per_row;
                const int at = i - row * per_row;
                const float* const from = first_row + row < item.n_rows
                                              ? p.q + static_cast<int64_t>(item.row_at(p, first_row + row)) * p.q_width
                                              : nullptr;
                reinterpret_cast<uint32_t*>(shared.queries + row * plan.k_tile_pitch)[at] =
                    query_word(p, from, at / 8, at % 8);
            }
        }
        __syncthreads();
    }

    __device__ __forceinline__ void issue(int i) {
        const int r = parts.region_of(tile_begin + i);
        if (i < n_tiles && shared.ways[r].staged) {
            const RegionArgs& region = p.regions[r];
            const int first = (tile_begin + i - parts.tiles_before(r)) * TILE;
            const int n = min(TILE, shared.ways[r].n_slots - first);
            uint8_t* const at = shared.stages + issue_stage * plan.stage;
            auto* const seq = reinterpret_cast<uint64_t*>(at + TILE * (p.k_pitch + p.v_pitch));
            auto* const pos = reinterpret_cast<int32_t*>(seq + TILE);
            if (maker_thread < n) {
                copy_async<8>(seq + maker_thread, region.seq + first + maker_thread);
                copy_async<4>(pos + maker_thread, region.pos + first + maker_thread);
            }
            const int n_k = min(TILE, round_up(n, region.k_block));  // all rows of a block hold some of its numbers
            copy_tile<TILE, 32 * makers>(maker_thread, at, p.k_pitch, region.k_row(first), region.k_row_bytes,
                                         shared.groups[2 * r], n_k);
            if (!in_keys) {
                copy_tile<TILE, 32 * makers>(maker_thread, at + TILE * p.k_pitch, p.v_pitch, region.v_row(first),
                                             region.v_row_bytes, shared.groups[2 * r + 1], n);
            }
        }
        issue_stage = issue_stage + 1 >= p.stages ? 0 : issue_stage + 1;
        copies_commit();
    }
    __device__ __forceinline__ TileSource source(int i) {
        const int r = parts.region_of(tile_begin + i);
        const RegionArgs& region = p.regions[r];
        const int first = (tile_begin + i - parts.tiles_before(r)) * TILE;
        const PrefillRegion way = shared.ways[r];
        TileSource of;
        of.n = min(TILE, way.n_slots - first);
        of.k_step = way.k_step;
        of.v_step = way.v_step;
        if (way.staged) {
            of.k = shared.stages + source_stage * plan.stage;
            of.v = of.k + TILE * p.k_pitch;
            of.seq = reinterpret_cast<const uint64_t*>(of.v + TILE * p.v_pitch);
            of.pos = reinterpret_cast<const int32_t*>(of.seq + TILE);
        } else {
            of.k = region.k_row(first) + shared.groups[2 * r].first;
            of.v = region.v_row(first) + shared.groups[2 * r + 1].first;
            of.seq = region.seq + first;
            of.pos = region.pos + first;
        }
        source_stage = source_stage + 1 >= p.stages ? 0 : source_stage + 1;
        of.seen = judge<TILE>(
            view, window, lane,
            [&](int s, int& pos) {
                const int slot = min(s, of.n - 1);
                pos = of.pos[slot];
                return s < of.n ? of.seq[slot] : 0;
            },
            of.used);
        return of;
    }
    __device__ __forceinline__ void note(const TileSource& from, PrefillMeta& to) const {
        if (maker_thread < TILE && from.seen != Seen::by_none) {
            to.seq[maker_thread] = maker_thread < from.n ? from.seq[maker_thread] : 0;
            to.pos[maker_thread] = maker_thread < from.n ? from.pos[maker_thread] : 0;
        }
        if (maker_thread == 0) to.seen = from.seen;
    }
    __device__ __forceinline__ SideChunks side(int i, bool is_k) const {
        const int at = parts.region_of(tile_begin + i) * chunks_per_region + (is_k ? 0 : 4 * p.k_blocks);
        return SideChunks{shared.chunks + at, shared.run_ends + at, 4 * (is_k ? p.k_blocks : p.v_blocks)};
    }
    __device__ __forceinline__ void make_k(int i, const TileSource& from, uint8_t* to) const {
        decode_side<TILE, makers, together>(maker, from, from.k, from.k_step, side(i, true), to, plan.k_tile_pitch);
    }
    __device__ __forceinline__ void make_v(int i, const TileSource& from, uint8_t* to) const {
        decode_side<TILE, makers, together>(maker, from, from.v, from.v_step, side(i, false), to, plan.v_tile_pitch);
    }

    // WC = 1: what the makers do.
    __device__ __forceinline__ void make_tiles() {
        for (int i = 0; i < p.stages; i++) issue(i);
        int buffer = 0;
#pragma unroll 1
        for (int i = 0; i < n_tiles; i++) {
            copies_wait(p.stages - 1);
            barrier_sync(making, 32 * makers);
            const TileSource from = source(i);
            if (i >= p.buffers) barrier_sync(empty + buffer, everyone);
            note(from, shared.meta[buffer]);
            if (from.seen != Seen::by_none) {
                uint8_t* const to = shared.tiles + buffer * plan.tile;
                make_k(i, from, to);
                make_v(i, from, to + TILE * plan.k_tile_pitch);
            }
            __threadfence_block();
            barrier_arrive(full + buffer, everyone);
            barrier_sync(making, 32 * makers);  // all have read what the next copies replace
            issue(i + p.stages);
            buffer = buffer + 1 == p.buffers ? 0 : buffer + 1;
        }
        copies_wait(0);
    }

    __device__ __forceinline__ void read_rows(Rows& of, Queries& q) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = row0 + 8 * i;
            const int at = row < item.n_rows ? item.row_at(p, row) : -1;
            of[i] = load_query_row(p, at);
            const float* const from = at >= 0 ? p.q + static_cast<int64_t>(at) * p.q_width : nullptr;
#pragma unroll
            for (int k = 0; k < KQ; k++) {
                q[k][i] = query_word(p, from, k, c);
                q[k][i + 2] = query_word(p, from, k, c + 4);
            }
        }
    }

    // s[j]: slots 8·NS·part + 8j + 2c (+1) of rows g, g + 8
    __device__ __forceinline__ void score(const uint8_t* k_tile, const Queries& q, float (&s)[NS][4]) const {
        const uint8_t* const my_k = k_tile + (8 * NS * part + k_row) * plan.k_tile_pitch + k_half;
        if constexpr (apart) {
            score_in_registers(my_k, q, s);
        } else if constexpr (NS % 2 == 0) {
            score_in_pairs(my_k, s);
        } else {
            score_eight(k_tile, s);
        }
    }
    __device__ __forceinline__ void score_in_registers(const uint8_t* my_k, const Queries& q, float (&s)[NS][4]) const {
        // operands are loaded two steps before their products
        constexpr int ahead = 2;
        uint32_t b[ahead + 1][4];
        const auto load = [&](int step) {
            load_four(b[step % (ahead + 1)],
                      my_k + 16 * (step % (NS / 2)) * plan.k_tile_pitch + 32 * (step / (NS / 2)));
        };
#pragma unroll
        for (int step = 0; step < ahead; step++) load(step);
#pragma unroll
        for (int step = 0; step < KQ * NS / 2; step++) {
            if (step + ahead < KQ * NS / 2) load(step + ahead);
            const int k = step / (NS / 2);
            const int j = step % (NS / 2) * 2;
            const auto& of = b[step % (ahead + 1)];
            mma(s[j], q[k], of[0], of[1]);
            mma(s[j + 1], q[k], of[2], of[3]);
        }
    }
    __device__ __forceinline__ void score_in_pairs(const uint8_t* my_k, float (&s)[NS][4]) const {
        const uint8_t* const my_q = shared.queries + 16 * group * plan.k_tile_pitch;
        // operands are loaded a step before their products; past the last step there is something to load
        uint32_t a[2][4];
        uint32_t b[2][NS / 2][4];
        const auto load = [&](int k, int at) {
            load_a(a[at], my_q + 32 * k, plan.k_tile_pitch, lane);
#pragma unroll
            for (int j = 0; j < NS / 2; j++) {
                load_four(b[at][j], my_k + 16 * j * plan.k_tile_pitch + 32 * k);
            }
        };
        load(0, 0);
#pragma unroll 2
        for (int k = 0; k < plan.k16; k += 2) {
#pragma unroll
            for (int at = 0; at < 2; at++) {
                load(k + at + 1, 1 - at);
#pragma unroll
                for (int j = 0; j < NS / 2; j++) {
                    mma(s[2 * j], a[at], b[at][j][0], b[at][j][1]);
                    mma(s[2 * j + 1], a[at], b[at][j][2], b[at][j][3]);
                }
            }
        }
    }
    __device__ __forceinline__ void score_eight(const uint8_t* k_tile, float (&s)[NS][4]) const {
        // eight slots: two steps at a time, in sums of their own
        const uint8_t* const my_q = shared.queries + 16 * group * plan.k_tile_pitch;
        const uint8_t* const k8 = k_tile + (8 * part + lane % 8) * plan.k_tile_pitch + lane / 8 * 16;
        float other[4] = {};
#pragma unroll 2
        for (int k = 0; k < plan.k16; k += 2) {
            uint32_t a[4];
            uint32_t b[4];
            load_four(b, k8 + 32 * k);
            load_a(a, my_q + 32 * k, plan.k_tile_pitch, lane);
            mma(s[0], a, b[0], b[1]);
            load_a(a, my_q + 32 * k + 32, plan.k_tile_pitch, lane);
            mma(other, a, b[2], b[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) s[0][e] += other[e];
    }

    // Scores as powers of two, -INFINITY where a row sees no slot; top: the highest of the warp's slots.
    __device__ __forceinline__ void mask(Seen what, const PrefillMeta& about, const Rows& rows, float (&s)[NS][4],
                                         float (&top)[2]) const {
        const float scale = p.scale * log2_e;
        if (what == Seen::by_all && p.alibi_slopes == nullptr) {
#pragma unroll
            for (int j = 0; j < NS; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[j][e] *= scale;
                    top[e / 2] = fmaxf(top[e / 2], s[j][e]);
                }
            }
        } else {
#pragma unroll
            for (int j = 0; j < NS; j++) {
                const int slot = 8 * NS * part + 8 * j + 2 * c;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int distance = rows[e / 2].pos - about.pos[slot + e % 2];
                    const bool visible = (about.seq[slot + e % 2] & rows[e / 2].seq) != 0 && distance >= 0 &&
                                         (p.window == 0 || distance < p.window);
                    s[j][e] = visible ? s[j][e] * scale - rows[e / 2].slope * static_cast<float>(distance) : -INFINITY;
                    top[e / 2] = fmaxf(top[e / 2], s[j][e]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
        }
    }

    // Weights w, sums so far relative to the new maximum.
    __device__ __forceinline__ void make_weights(const float (&top)[2], const float (&s)[NS][4], PrefillState& state,
                                                 Sums& acc, uint32_t (&w)[NS][2]) const {
        float base[2];
        float by[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float higher = fmaxf(state.top[r], top[r]);
            base[r] = higher == -INFINITY ? 0.0f : higher;
            by[r] = exp2f(state.top[r] - base[r]);
            state.top[r] = higher;
        }
        // a maximum rarely moves once a few tiles have passed
        if (__any_sync(0xffffffffu, by[0] != 1.0f || by[1] != 1.0f)) {
#pragma unroll
            for (int e = 0; e < 4; e++) state.sums[e] *= by[e / 2];
#pragma unroll
            for (int n = 0; n < NV; n++) {
#pragma unroll
                for (int e = 0; e < 8; e++) acc[n][e / 4][e % 4] *= by[e / 2 % 2];
            }
        }
#pragma unroll
        for (int j = 0; j < NS; j++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                w[j][r] = bits(
                    __floats2half2_rn(power_of_two(s[j][2 * r] - base[r]), power_of_two(s[j][2 * r + 1] - base[r])));
            }
        }
    }
    // WC > 1: warps of the same rows exchange their maxima, while V is made in K's place unless it is there, and their weights.
    __device__ __forceinline__ void exchange_maxima(int i, const TileSource& from, float (&top)[2]) const {
        if (c == 0) {
            shared.maxima[(16 * group + g) * WC + part] = top[0];
            shared.maxima[(16 * group + g + 8) * WC + part] = top[1];
        }
        __syncthreads();  // all are done with K
        if (!in_keys) make_v(i, from, shared.tiles);
#pragma unroll
        for (int w = 0; w < WC; w++) {
            top[0] = fmaxf(top[0], shared.maxima[(16 * group + g) * WC + w]);
            top[1] = fmaxf(top[1], shared.maxima[(16 * group + g + 8) * WC + w]);
        }
    }
    __device__ __forceinline__ void exchange_weights(const uint32_t (&w)[NS][2]) const {
#pragma unroll
        for (int j = 0; j < NS && scores; j++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint8_t* const to =
                    shared.weights + (16 * group + g + 8 * r) * weights_pitch + 2 * (8 * NS * part + 8 * j + 2 * c);
                *reinterpret_cast<uint32_t*>(to) = w[j][r];
            }
        }
        __syncthreads();  // V and the weights are there
    }

    __device__ __forceinline__ void add_values(const uint8_t* v_tile, const uint32_t (&w)[NS][2], PrefillState& state,
                                               Sums& acc) const {
        constexpr uint32_t ones = 0x3c003c00u;
        constexpr int steps = TILE / 16;
        const uint8_t* const my_v = v_tile + v_row * plan.v_tile_pitch + v_half;
        // a warp's blocks of 64 channels, those of the others between them
#pragma unroll
        for (int n4 = 0; n4 < NV / 4; n4++) {
            const int block = WC * n4 + part;
            if (!apart && block >= p.v_blocks) break;
            constexpr int ahead = 2;
            uint32_t b[ahead + 1][4];
            const auto load = [&](int step) {
                load_four<true>(b[step % (ahead + 1)],
                                my_v + 16 * (step / 4) * plan.v_tile_pitch + 32 * (4 * block + step % 4));
            };
#pragma unroll
            for (int step = 0; step < ahead; step++) load(step);
            uint32_t next[4];
            const auto load_weights = [&](int k) {
                load_a(next, shared.weights + 16 * group * weights_pitch + 32 * k, weights_pitch, lane);
            };
            if constexpr (!apart) load_weights(0);
#pragma unroll
            for (int k = 0; k < steps; k++) {
                uint32_t a[4];
                if constexpr (apart) {
                    a[0] = w[2 * k][0];
                    a[1] = w[2 * k][1];
                    a[2] = w[2 * k + 1][0];
                    a[3] = w[2 * k + 1][1];
                } else {
#pragma unroll
                    for (int e = 0; e < 4; e++) a[e] = next[e];
                    if (k + 1 < steps) load_weights(k + 1);
                }
                if (n4 == 0) mma(state.sums, a, ones, ones);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const int step = 4 * k + n;
                    if (step + ahead < 4 * steps) load(step + ahead);
                    const auto& of = b[step % (ahead + 1)];
                    mma(acc[4 * n4 + n][0], a, of[0], of[1]);
                    mma(acc[4 * n4 + n][1], a, of[2], of[3]);
                }
            }
        }
    }

    // What the others do, tile by tile; WC > 1: all warps.
    __device__ __forceinline__ void walk(const Rows& rows, const Queries& q, PrefillState& state, Sums& acc) {
        if constexpr (!apart) {
            for (int i = 0; i < p.stages; i++) issue(i);
        }
        int buffer = 0;
#pragma unroll 1
        for (int i = 0; i < n_tiles; i++) {
            const PrefillMeta& about = shared.meta[buffer];
            const uint8_t* const k_tile = shared.tiles + buffer * plan.tile;
            const uint8_t* const v_tile = k_tile + (apart ? TILE * plan.k_tile_pitch : p.values_at);
            [[maybe_unused]] TileSource from;
            Seen what;
            if constexpr (apart) {
                barrier_sync(full + buffer, everyone);
                what = about.seen;
            } else {
                copies_wait(p.stages - 1);
                __syncthreads();
                from = source(i);
                what = from.seen;
                if (what != Seen::by_none) {
                    note(from, shared.meta[0]);
                    make_k(i, from, shared.tiles);
                    __syncthreads();
                }
            }
            if (what != Seen::by_none) {
                float s[NS][4] = {};
                float top[2] = {-INFINITY, -INFINITY};
                if (scores) {
                    score(k_tile, q, s);
                    mask(what, about, rows, s, top);
                }
                if constexpr (!apart) exchange_maxima(i, from, top);
                uint32_t w[NS][2];
                make_weights(top, s, state, acc, w);
                if constexpr (!apart) exchange_weights(w);
                add_values(v_tile, w, state, acc);
            }
            if constexpr (apart) {
                if (i + p.buffers < n_tiles) barrier_arrive(empty + buffer, everyone);
                buffer = buffer + 1 == p.buffers ? 0 : buffer + 1;
            } else {
                __syncthreads();  // what the next copies and the next K replace
                issue(i + p.stages);
            }
        }
        if constexpr (!apart) copies_wait(0);
    }

    __device__ __forceinline__ void leave(const PrefillState& state, const Sums& acc) const {
        // element e of half h of block n: channel pair_channel(4h + c) of it, or two further
        const bool whole = parts.count == 1 && p.v_b == nullptr && p.leaves != Leaves::parts;
        const int width = 64 * p.v_blocks;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = row0 + 8 * r;
            if (row >= item.n_rows) continue;
            const int64_t out_row = item.row_at(p, row);
            const float sum = state.sums[2 * r];
            const int64_t at = static_cast<int64_t>(split) * p.n_tokens * p.n_head + out_row;
            const float by = whole ? (sum > 0.0f ? 1.0f / sum : 0.0f) : 1.0f;
            float* const to = whole ? p.out + out_row * p.head_dim : p.partial + at * width;
            const int limit = whole ? p.head_dim : width;
            if (!whole && c == 0 && part == 0) {
                reinterpret_cast<float2*>(p.partial_ml)[at] = make_float2(state.top[r], sum);
            }
#pragma unroll
            for (int n = 0; n < NV; n++) {
                const int block = 4 * (WC * (n / 4) + part) + n % 4;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int channel = 16 * block + pair_channel(4 * (e / 2) + c) + 2 * (e % 2);
                    if (channel < limit) to[channel] = acc[n][e / 2][2 * r + e % 2] * by;
                }
            }
        }
    }
};

}  // namespace lkv::cuda
