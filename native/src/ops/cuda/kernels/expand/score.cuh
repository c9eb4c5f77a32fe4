// One thread block: one head of 128 dimensions or two of 64, whose B stays in shared memory. Each warpgroup walks over tiles of 64 slots by
// itself, so that one decodes or turns while another multiplies, and nobody waits for a barrier:
//
//   latents   decoded in registers where they come, operand a
//   keys      latents · B by warpgroups; RoPE where the sums lie
//   scores    keys in f16 are operand a as they lie; queries are operand b
//
// Written for a head's few query rows: where keys of f16 went to memory and came back, a layer of 16384 slots took 130 us.
#pragma once

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/expand/keys.cuh"
#include "ops/cuda/kernels/expand/layout.h"
#include "ops/cuda/kernels/expand/product.cuh"

namespace lkv::cuda {

// A warp's latents of one unit: 16 slots x 16 channels twice, operands a.
using UnitPair = uint32_t[2][4];

// B to shared memory, a channel a row of 16 bytes, in the order of KeyReader's pairs. By all threads; zeros behind the last channel.
__device__ inline void copy_factor(const ExpandSide& side, int head0, int head_dim, const ScoreLayout& layout,
                                   uint8_t* to) {
    // a thread has one row of every 32 and eight dimensions; eight lanes write 128 bytes
    static_assert(score_threads == 16 * 32);
    const int thread = static_cast<int>(threadIdx.x);
    const int row = thread / 32 % 4 * 8 + thread % 8;
    const int column = (thread / 128 * 4 + thread / 8 % 4) * 8;
    const int c = row % 8 / 2 * 8 + row / 16 * 4 + row % 2 * 2 + row / 8 % 2;  // its channel
    const int head = column >= head_dim ? 1 : 0;
    const uint16_t* from =
        side.factor + (static_cast<int64_t>(head0 + head) * side.rank + c) * head_dim + column - head * head_dim;
    uint8_t* at = to + column / 8 * layout.pitch + row * 16;
    for (int channel = c; channel < layout.depth; channel += 32, at += 32 * 16, from += 32 * head_dim) {
        if (channel < side.rank) {
            copy_async<16>(at, from);
        } else {
            *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
        }
    }
}

// Query rows as operand b: lane 4g + t has of row 8n + g dimensions 16j + 2t, + 1, + 8, + 9. row_at: of [n_tokens, n_head], below 0: none
template <int NT>
__device__ inline void load_query_pairs(const Problem& p, const int (&row_at)[2][8 * NT], uint2* queries) {
    for (int i = static_cast<int>(threadIdx.x); i < 8 * NT * 32; i += score_threads) {
        const int d = i / (32 * NT) * 16 + i % 4 * 2;
        const int head = d >= p.head_dim ? 1 : 0;
        const int at = row_at[head][i / 32 % NT * 8 + i % 32 / 4];
        const float* const from = p.q + static_cast<int64_t>(max(at, 0)) * p.q_width + d - head * p.head_dim;
        queries[i] =
            at < 0 ? make_uint2(0, 0)
                   : make_uint2(bits(__floats2half2_rn(from[0], from[1])), bits(__floats2half2_rn(from[8], from[9])));
    }
}

// The keys of a warp's 16 slots before RoPE. rows: of the lane's slots g and g + 8
__device__ __forceinline__ void make_keys(float (&acc)[64], const uint8_t* const (&rows)[2], const MlaUnit* units,
                                          int n_units, const Operand& factor, int lane) {
    // units begin … end - 1, which are of one kind
    const auto run = [&](auto bits, int begin, int end) __attribute__((always_inline)) {
        constexpr int Bits = decltype(bits)::value;
        const KeyReader<Bits> reader(lane);
        uint32_t words[2][KeyReader<Bits>::n_words];
        uint32_t affine[2] = {};
        int at = 0;
        int segment_end = begin;
        const auto load = [&](int u) __attribute__((always_inline)) {
            if (u == segment_end) {
                const MlaUnit unit = units[u];
                segment_end = unit.end;
                at = unit.codes;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if constexpr (Bits < 16) affine[i] = UnitAffine<Bits>(unit).of(rows[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) reader.load(rows[i] + at, words[i]);
            at += 4 * Bits;
        };
        UnitPair a = {};  // of the unit whose products are under way, while the next one is decoded
        load(begin);
#pragma unroll 1
        for (int u = begin; u < end; u++) {
            uint32_t pairs[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) reader.decode(words[i], affine[i], pairs[i]);
            if (u + 1 < end) load(u + 1);
            warpgroup_wait_all(a);
#pragma unroll
            for (int k = 0; k < 2; k++) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[k][i] = pairs[i % 2][2 * k + i / 2];
            }
            warpgroup_begin();
#pragma unroll
            for (int k = 0; k < 2; k++) {
                warpgroup_mma(acc, a[k], factor.at(static_cast<uint32_t>(512 * u + 256 * k)), u + k > 0);
            }
            warpgroup_commit();
        }
        warpgroup_wait_all(a);
    };
#pragma unroll 1
    for (int u = 0; u < n_units;) {
        const int end = min(static_cast<int>(units[u].kind_end), n_units);
        with_unit(units[u].kind, [&](auto bits) __attribute__((always_inline)) { run(bits, u, end); });
        u = end;
    }
    warpgroup_wait(acc);
}

// scores[slot g or g + 8][rows 2t, 2t + 1 of each eight] of one head, whose dimensions are 16·first_j … 16·end_j - 1 of the keys.
template <int NT>
__device__ __forceinline__ void score_keys(float (&scores)[NT][4], const float (&acc)[64], int first_j, int end_j,
                                           const uint2* queries, int lane) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (j < first_j || j >= end_j) continue;
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = 8 * j + i / 2 * 4 + i % 2 * 2;
            a[i] = bits(__floats2half2_rn(acc[at], acc[at + 1]));
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint2 q = queries[(j * NT + n) * 32 + lane];
            mma(scores[n], a, q.x, q.y);
        }
    }
}

// A warp's 16 slots of one region: those of lanes 4g … 4g + 3 are g and g + 8.
struct ScoreTile {
    const uint8_t* first;  // of the group, in slot 0
    int row_bytes;
    int r, slot, last;

    __device__ ScoreTile(const Problem& p, const Parts& parts, int group, int t, int warp) : r(parts.region_of(t)) {
        const RegionArgs& region = p.regions[r];
        first = region.k_rows + region.k_groups[group].first;
        row_bytes = static_cast<int>(region.k_row_bytes);
        slot = (t - parts.tiles_before(r)) * expand_tile + score_slots * (warp % 4);
        last = p.n_slots[r] - 1;
    }
    __device__ int slot_of(int s) const { return min(slot + s, last); }
    __device__ const uint8_t* row(int s) const { return first + static_cast<int64_t>(slot_of(s)) * row_bytes; }
};

// RoPE. eight: cosine and sine of eight positions in every plane. Slots g and g + 8 are so far apart as a rule, and half of the sines, which
// four lanes a cycle get, are products.
__device__ __forceinline__ void turn_slots(const Problem& p, float (&acc)[64], const ScoreTile& tile,
                                           const float2* eight, int lane) {
    const int32_t* const positions = p.regions[tile.r].pos;
    const int g = lane / 4;
    const int pos[2] = {positions[tile.slot_of(g)], positions[tile.slot_of(g + 8)]};
    const bool apart = __all_sync(0xffffffffu, pos[1] == pos[0] + 8 || tile.slot + g + 8 > tile.last);
    turn_keys(p, acc, lane, [&](int plane, float2(&of)[2]) __attribute__((always_inline)) {
        const uint64_t phase = p.phases[plane];
        of[0] = angle_of(phase, pos[0]);
        if (apart) {
            const float2 by = eight[plane];
            of[1] = make_float2(of[0].x * by.x - of[0].y * by.y, of[0].x * by.y + of[0].y * by.x);
        } else {
            of[1] = angle_of(phase, pos[1]);
        }
    });
}

// Scores of a tile to memory, whose first slot is `index` of the chunk.
template <int NT>
__device__ __forceinline__ void leave_scores(const Problem& p, const float (&acc)[64], const ScoreTo& to, int heads,
                                             const int (&row_at)[2][8 * NT], int index, const uint2* queries,
                                             int lane) {
    const int n_j = p.head_dim / 16;  // of a head
#pragma unroll 1
    for (int head = 0; head < heads; head++) {
        float scores[NT][4] = {};
        score_keys<NT>(scores, acc, head * n_j, (head + 1) * n_j, queries, lane);
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int at = row_at[head][8 * n + lane % 4 * 2 + e];
                if (at < 0) continue;
                float* const row = to.scores + static_cast<int64_t>(at) * to.slots + index + lane / 4;
                row[0] = scores[n][e];
                row[8] = scores[n][2 + e];
            }
        }
    }
}

// grid: as many thread blocks a head as there are multiprocessors for x heads of a thread block
template <int NT>
__global__ void __launch_bounds__(score_threads, 1)
    score_kernel(const __grid_constant__ CutProblem p, const __grid_constant__ ExpandSide side,
                 const __grid_constant__ ScoreTo to) {
    let_next_start();
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ MlaUnit units[max_regions][most_units];
    __shared__ int n_units[max_regions];
    __shared__ int row_at[2][8 * NT];
    __shared__ float2 eight[expand_columns / 2];
    const ScoreLayout layout(p);
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / 32;
    const int lane = thread % 32;
    auto* const queries = reinterpret_cast<uint2*>(shared + layout.factor);
    const int head0 = static_cast<int>(blockIdx.y) * side.heads;
    const int group = small_quotient(head0, side.group);
    // weights, which no earlier kernel of the step writes
    copy_factor(side, head0, p.head_dim, layout, shared);
    copies_commit();
    if (warp < p.n_regions) {
        const RegionArgs& region = p.regions[warp];
        const int n = note_units(region.chunks + region.k_groups[group].chunks, 4 * side.blocks, 0, units[warp]);
        if (lane == 0) n_units[warp] = n;
    }
    if (thread < p.n_rot / 2) eight[thread] = angle_of(p.phases[thread], 8);
    if (thread < 2 * 8 * NT) {
        const int head = thread / (8 * NT);
        const int row = thread % (8 * NT);
        const int rep = small_quotient(p.n_head, p.n_kv);
        const int token = small_quotient(row, rep);
        const bool exists = head < side.heads && row < p.n_tokens * rep;
        row_at[head][row] = exists ? token * p.n_head + (head0 + head) * rep + row - token * rep : -1;
    }
    wait_for_previous();
    __syncthreads();
    load_query_pairs<NT>(p, row_at, queries);
    copies_wait(0);
    before_async_access();
    __syncthreads();

    const Parts parts(p);
    const int end = min(parts.n_tiles, to.first_tile + to.slots / expand_tile);
    const int step = score_groups * static_cast<int>(gridDim.x);
    const Operand factor(static_cast<uint32_t>(__cvta_generic_to_shared(shared)), static_cast<uint32_t>(layout.pitch));
#pragma unroll 1
    for (int t = to.first_tile + static_cast<int>(blockIdx.x) * score_groups + warp / 4; t < end; t += step) {
        const ScoreTile tile(p, parts, group, t, warp);
        const uint8_t* const rows[2] = {tile.row(lane / 4), tile.row(lane / 4 + 8)};
        if (t + step < end) prefetch(ScoreTile(p, parts, group, t + step, warp).row(lane / 2) + lane % 2 * 128);
        float acc[64] = {};
        make_keys(acc, rows, units[tile.r], n_units[tile.r], factor, lane);
        // phases and queries are read again for every tile: kept from one to the next they take the registers that products need
        const int again = forgotten(lane);
        turn_slots(p, acc, tile, eight, again);
        const int index = (t - to.first_tile) * expand_tile + score_slots * (warp % 4);
        leave_scores<NT>(p, acc, to, side.heads, row_at, index, queries, again);
    }
}

}  // namespace lkv::cuda
