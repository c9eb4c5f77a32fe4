// One thread block: a part of the slots, up to 32 query rows of the heads that share a latent, all of its channels.
//
//   scores     a warp takes 16 slots and a share of K's channels: latents are decoded into operand a, queries are operand b
//   softmax    a warp takes rows of the tile's scores, adds up the shares, makes weights
//   sums       a warp takes a share of V's channels and all of the tile's slots: latents are operand a, weights are operand b
//
// with a barrier behind each. K of the next tile is copied during softmax and sums, V of the next one during scores. Where scores are
// there, V of the next tile is copied beside this one's, and where K and V are one row, all of it.
// A latent is decoded once a thread block and goes from the registers into the product.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/mla/block.cuh"
#include "ops/cuda/kernels/mla/scores.cuh"
#include "ops/cuda/kernels/mla/sums.cuh"
#include "ops/cuda/kernels/mla/weights.cuh"

namespace lkv::cuda {

// NT: blocks of eight query rows. U: units of V that a warp sums. Apart: MlaPlan::apart.
template <int NT, int U, MlaK K, bool Apart = false>
__global__ void __launch_bounds__(mla_threads, 1)
    mla_kernel(const __grid_constant__ MlaArgs p, const __grid_constant__ MlaLayout layout) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ MlaShared own;
    let_next_start();
    auto* const queries = reinterpret_cast<uint4*>(shared);
    auto* const scores = reinterpret_cast<float*>(shared + layout.queries);
    auto* const weights = reinterpret_cast<__half*>(shared + layout.queries + layout.scores);
    auto* const units = reinterpret_cast<MlaUnit*>(shared + layout.queries + layout.scores + layout.weights);
    uint8_t* const k_stage = shared + layout.queries + layout.scores + layout.weights + layout.units;
    uint8_t* const v_stage = k_stage + layout.k_stage;
    constexpr bool scored = K == MlaK::scores;
    constexpr bool alternates = stages_alternate(K);
    constexpr bool of_chunks = K == MlaK::rows || K == MlaK::scores;
    const auto stage_of = [&](int parity) { return alternates && parity != 0 ? k_stage : v_stage; };  // of V
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;

    const MlaSlots n_slots(p);
    const MlaSteps steps(p, n_slots);
    const MlaShare<Apart> share(p, steps);
    const int part = share.part;
    if (part < 0) return;
    const int begin = share.begin;
    const int end = share.end;
    const auto tile_at = [&](int i) { return tile_of<Apart>(own, steps, share, i); };
    set_up(p, steps, n_slots, share.token, own, units);
    __syncthreads();
    wait_for_previous();
    RowScores<NT> x = {};
    if (begin < end) {
        const MlaTile tile = tile_at(begin);
        copy_marks(own.marks[0], tile);
        if constexpr (scored) fetch_scores<NT>(x, p, own, tile, warp, lane);
        if constexpr (!alternates) copy_rows(k_stage, tile.region->k, tile);
        copies_commit();
        copy_rows(v_stage, tile.region->v, tile);
    }
    copies_commit();
    if constexpr (!scored) load_queries<NT>(p, own, queries);
    copies_wait(alternates ? 0 : 1);
    __syncthreads();

    UnitSums<NT> sums[U] = {};
    MlaState state[warp_rows<NT>];
#pragma unroll 1
    for (int i = begin, parity = 0; i < end; parity ^= 1) {
        const MlaTile tile = tile_at(i);
        i = tile.next;
        const MlaUnit* const of_region = units + tile.r * 2 * most_units;
        const auto copy_next = [&] {
            if (i < end) {
                const MlaTile next = tile_at(i);
                copy_marks(own.marks[parity ^ 1], next);
                if constexpr (alternates) {
                    copy_rows(stage_of(parity ^ 1), next.region->v, next);
                } else {
                    copy_rows(k_stage, next.region->k, next);
                }
            }
            copies_commit();
        };
        if constexpr (alternates) copy_next();
        if constexpr (!scored) {
            const uint8_t* const stage = alternates ? stage_of(parity) : k_stage;
            score_tile<NT, K>(p, own, tile, stage, of_region, queries, scores, warp, lane);
            __syncthreads();  // scores are there, K has been read
        }
        if constexpr (!alternates) copy_next();
        const auto make = [&](auto steps) __attribute__((always_inline)) {
            constexpr int Steps = decltype(steps)::value;
            if constexpr (!scored) load_scores<NT, Steps>(x, scores, warp, lane);
            return make_weights<NT, Steps>(p, own, own.marks[parity], tile, x, weights, state, warp, lane);
        };
        const int made = tile.slots == 128  ? make(std::integral_constant<int, 4>{})
                         : tile.slots == 64 ? make(std::integral_constant<int, 2>{})
                                            : make(std::integral_constant<int, 1>{});
        const bool holes = (made & 2) != 0;
        if (scored && i < end) fetch_scores<NT>(x, p, own, tile_at(i), warp, lane);
        copies_wait(1);                                        // V of this tile
        const bool rescale = __syncthreads_or(made & 1) != 0;  // weights are there
        if (holes) {
            clear_holes(stage_of(parity), tile, own.tokens, warp, lane);
            __syncthreads();
        }
        if (rescale) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const float2 by = *reinterpret_cast<const float2*>(own.scales + 8 * n + 2 * (lane % 4));
#pragma unroll
                for (int u = 0; u < U; u++) {
#pragma unroll
                    for (int e = 0; e < 8; e++) sums[u][e / 4][n][e % 4] *= e % 2 == 0 ? by.x : by.y;
                }
            }
        }
        sum_tile<NT, U, K>(sums, tile, stage_of(parity), of_region + most_units, weights, own.tokens, warp, lane);
        copies_wait(0);   // K of the next tile, or V
        __syncthreads();  // V has been read
        if (!alternates && i < end) {
            const MlaTile next = tile_at(i);
            copy_rows(v_stage, next.region->v, next);
        }
        copies_commit();
    }

    // A part's mean of V in f16, a row's maximum and sum of weights: what the parts are merged from.
    const int64_t first_row = static_cast<int64_t>(part) * p.n_tokens * p.n_head;
#pragma unroll
    for (int k = 0; k < warp_rows<NT>; k++) {
        float sum = state[k].sum;
#pragma unroll
        for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
        const int row = warp * warp_rows<NT> + k;
        if (lane != 0 || row >= 8 * NT) continue;
        const int at = own.rows[row].at;
        float top = state[k].top;
        float by = 1.0f;
        float before = 0.0f;  // what this part has of the chunks before
        float2* const ml = reinterpret_cast<float2*>(p.partial_ml) + first_row + max(at, 0);
        if (of_chunks && p.mla.keys.continues != 0 && at >= 0 && ml->y > 0.0f) {
            const float most = fmaxf(top, ml->x);
            by = power_of_two(top - most);
            before = ml->y * power_of_two(ml->x - most);
            top = most;
        }
        sum = sum > 0.0f ? sum * by : 0.0f;
        const float inverse = sum + before > 0.0f ? 1.0f / (sum + before) : 0.0f;
        own.scales[row] = sum > 0.0f ? by * inverse : 0.0f;
        if constexpr (of_chunks) own.before[row] = before * inverse;
        if (at >= 0) *ml = make_float2(top, sum + before);
    }
    __syncthreads();
    const int width = 64 * p.v_blocks;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * n + 2 * (lane % 4) + e;
            const int at = own.rows[row].at;
            if (at < 0) continue;
            const float by = own.scales[row];
            __half* const to = reinterpret_cast<__half*>(p.partial) + (first_row + at) * width + 4 * (lane / 4);
#pragma unroll
            for (int u = 0; u < U; u++) {
                const int channel = unit_channels * (warp * U + u);
                if (channel >= width) continue;
                const auto pair = [&](int m) {
                    return bits(__floats2half2_rn(sums[u][m][n][e] * by, sums[u][m][n][e + 2] * by));
                };
                uint2 mean = make_uint2(pair(0), pair(1));
                if constexpr (of_chunks) {
                    if (own.before[row] > 0.0f) {
                        const uint2 other = *reinterpret_cast<const uint2*>(to + channel);
                        const __half2 share = __float2half2_rn(own.before[row]);
                        mean.x = bits(__hfma2(half2_of(other.x), share, half2_of(mean.x)));
                        mean.y = bits(__hfma2(half2_of(other.y), share, half2_of(mean.y)));
                    }
                }
                *reinterpret_cast<uint2*>(to + channel) = mean;
            }
        }
    }
}

}  // namespace lkv::cuda
