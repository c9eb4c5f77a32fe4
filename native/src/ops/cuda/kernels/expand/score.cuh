// One thread block: one head of 128 dimensions or two of 64, whose B stays in shared memory (resident.cuh):
//
//   latents   decoded in registers where they come, operand a
//   keys      latents · B by warpgroups; RoPE where the sums lie
//   scores    keys in f16 are operand a as they lie; queries are operand b
//
// Written for a head's few query rows: where keys of f16 went to memory and came back, a layer of 16384 slots took 130 us.
#pragma once

#include "ops/cuda/kernels/expand/resident.cuh"

namespace lkv::cuda {

// Query rows as operand b: lane 4g + t has of row 8n + g dimensions 16j + 2t, + 1, + 8, + 9. row_at: of [n_tokens, n_head], below 0: none
template <int NT>
__device__ inline void load_query_pairs(const Problem& p, const int (&row_at)[2][8 * NT], uint2* queries) {
    for (int i = static_cast<int>(threadIdx.x); i < 8 * NT * 32; i += resident_threads) {
        const int d = i / (32 * NT) * 16 + i % 4 * 2;
        const int head = d >= p.head_dim ? 1 : 0;
        const int at = row_at[head][i / 32 % NT * 8 + i % 32 / 4];
        const float* const from = p.q + static_cast<int64_t>(max(at, 0)) * p.q_width + d - head * p.head_dim;
        queries[i] =
            at < 0 ? make_uint2(0, 0)
                   : make_uint2(bits(__floats2half2_rn(from[0], from[1])), bits(__floats2half2_rn(from[8], from[9])));
    }
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
__global__ void __launch_bounds__(resident_threads, 1)
    score_kernel(const __grid_constant__ CutProblem p, const __grid_constant__ ExpandSide side,
                 const __grid_constant__ ScoreTo to) {
    let_next_start();
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ResidentUnits units;
    __shared__ int row_at[2][8 * NT];
    __shared__ float2 eight[expand_columns / 2];
    const ScoreLayout layout(p);
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / 32;
    const int lane = thread % 32;
    auto* const queries = reinterpret_cast<uint2*>(shared + layout.factor.total);
    const int head0 = static_cast<int>(blockIdx.y) * side.heads;
    const int group = small_quotient(head0, side.group);
    // weights, which no earlier kernel of the step writes
    copy_factor(side, head0, 0, p.head_dim, layout.factor, shared);
    copies_commit();
    units.note(p, side, true, group);
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
    const int step = resident_groups * static_cast<int>(gridDim.x);
    const Operand factor(static_cast<uint32_t>(__cvta_generic_to_shared(shared)),
                         static_cast<uint32_t>(layout.factor.pitch));
#pragma unroll 1
    for (int t = to.first_tile + static_cast<int>(blockIdx.x) * resident_groups + warp / 4; t < end; t += step) {
        const LatentTile tile(p, parts, true, group, t, warp);
        const uint8_t* const rows[2] = {tile.row(lane / 4), tile.row(lane / 4 + 8)};
        if (t + step < end) prefetch(LatentTile(p, parts, true, group, t + step, warp).row(lane / 2) + lane % 2 * 128);
        float acc[64] = {};
        multiply_latents(acc, rows, units.of[tile.r], units.n[tile.r], factor, lane);
        // phases and queries are read again for every tile: kept from one to the next they take the registers that products need
        const int again = forgotten(lane);
        turn_slots(p, acc, tile, eight, again);
        const int index = (t - to.first_tile) * expand_tile + resident_slots * (warp % 4);
        leave_scores<NT>(p, acc, to, side.heads, row_at, index, queries, again);
    }
}

}  // namespace lkv::cuda
