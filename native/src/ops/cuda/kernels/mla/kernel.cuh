// One thread block: a part of the slots, up to 32 query rows of the heads that share a latent, all of its channels.
//
//   scores     a warp takes 16 slots and a share of K's channels: latents are decoded into operand a, queries are operand b
//   softmax    a warp takes rows of the tile's scores, adds up the shares, makes weights
//   sums       a warp takes a share of V's channels and all of the tile's slots: latents are operand a, weights are operand b
//
// with a barrier behind the scores, and one behind softmax of this tile and sums of the one before. K of the next tile is copied meanwhile,
// V of this one during the next scores. Where scores are there, V of the next tile is copied beside this one's, and where K and V are one
// row, all of it; then sums are of the same tile, and a barrier is before them.
// A latent is decoded once a thread block and goes from the registers into the product.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/mla/block.cuh"
#include "ops/cuda/kernels/mla/scores.cuh"
#include "ops/cuda/kernels/mla/sums.cuh"
#include "ops/cuda/kernels/mla/weights.cuh"

namespace lkv::cuda {

// NT: blocks of eight query rows. U: units of V that a warp sums. Apart: Cut::apart.
template <int NT, int U, MlaK K, bool Apart = false>
__global__ void __launch_bounds__(mla_threads, 1)
    mla_kernel(const __grid_constant__ MlaArgs p, const __grid_constant__ MlaLayout layout) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ MlaShared own;
    let_next_start();
    auto* const queries = reinterpret_cast<uint4*>(shared);
    auto* const scores = reinterpret_cast<float*>(shared + layout.queries);
    auto* const weights = reinterpret_cast<__half*>(shared + layout.queries + layout.scores);
    uint8_t* const all_scales = shared + layout.queries + layout.scores + layout.weights;
    auto* const units = reinterpret_cast<MlaUnit*>(all_scales + layout.scales);
    uint8_t* const k_stage = all_scales + layout.scales + layout.units;
    uint8_t* const v_stage = k_stage + layout.k_stage;
    constexpr bool scored = K == MlaK::scores;
    constexpr bool alternates = stages_alternate(K);
    // V is multiplied beside the next tile's softmax, whose chains it fills, where it has a stage of its own and registers suffice
    constexpr bool behind = !alternates && NT < 4;
    constexpr bool of_chunks = K == MlaK::rows || K == MlaK::scores;
    const auto stage_of = [&](int parity) { return alternates && parity != 0 ? k_stage : v_stage; };  // of V
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;

    const MlaSlots n_slots(p);
    const MlaSteps steps(p, n_slots);
    // lists of one token, whose query rows are known, may come while the rest is set up
    const bool late = Apart && p.late_slots != 0;
    const bool later = late && p.n_tokens == 1;
    if (late && !later) wait_for_previous();
    MlaShare<Apart> share;
    if (!later) {
        share = MlaShare<Apart>(p, steps);
        if (share.part < 0) return;
    }
    const auto scales_of = [&](int parity) { return MlaScales(all_scales, p.mla.tile, parity); };
    const auto tile_at = [&](int i) { return tile_of<Apart>(own, steps, share, i); };
    set_up(p, steps, n_slots, later ? 0 : share.token, own, units);
    __syncthreads();
    wait_for_previous();
    if (later) {
        share = MlaShare<Apart>(p, steps);
        if (share.part < 0) return;
    }
    const int part = share.part;
    const int begin = share.begin;
    const int end = share.end;
    RowScores<NT> x = {};
    MlaTile tile = tile_at(begin);
    if (begin < end) {
        copy_marks(own.marks[0], scales_of(0), tile);
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
    const auto weights_of = [&](int parity) { return weights + (behind ? parity * 8 * NT * p.mla.tile : 0); };
    // weights · V of a tile. made: what make_weights found, of all warps
    const auto add_values = [&](const MlaTile& tile, int parity, int made) __attribute__((always_inline)) {
        const uint32_t* const tokens = own.tokens[parity];
        if ((made & 2) != 0) {
            clear_holes(stage_of(parity), tile, tokens, warp, lane);
            __syncthreads();
        }
        if ((made & 1) != 0) rescale_sums<NT, U>(sums, own.scales[parity], lane);
        sum_tile<NT, U, K>(sums, tile, stage_of(parity), units + (tile.r * 2 + 1) * most_units, weights_of(parity),
                           tokens, scales_of(parity), warp, lane);
    };
    MlaTile next = tile;
    int made = 0;
    // Where sums are of the tile before, there is one step more.
#pragma unroll 1
    for (int i = begin, parity = 0; begin < end && (behind || i < end); parity ^= 1) {
        const MlaTile before = tile;
        const int made_before = made;
        const bool is_first = i == begin;
        const bool is_last = i == end;
        if (!is_last) {
            tile = behind ? next : tile_at(i);
            i = tile.next;
        }
        const auto copy_next = [&] {
            if (i < end) {
                next = tile_at(i);
                copy_marks(own.marks[parity ^ 1], scales_of(parity ^ 1), next);
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
            const MlaUnit* const k_units = units + tile.r * 2 * most_units;
            if (!is_last) score_tile<NT, K>(p, own, tile, stage, k_units, queries, scores, warp, lane);
            if constexpr (behind) copies_wait(0);  // V of the tile before
            __syncthreads();                       // scores are there, K has been read
        }
        if (!is_last) {
            if constexpr (!alternates) copy_next();
            const auto make = [&](auto steps) __attribute__((always_inline)) {
                constexpr int Steps = decltype(steps)::value;
                if constexpr (!scored) load_scores<NT, Steps>(x, scores, warp, lane);
                return make_weights<NT, Steps>(p, own, parity, tile, x, weights_of(parity), state, warp, lane);
            };
            keep_scales(scales_of(parity), own.marks[parity], tile);
            made = tile.slots == 128  ? make(std::integral_constant<int, 4>{})
                   : tile.slots == 64 ? make(std::integral_constant<int, 2>{})
                                      : make(std::integral_constant<int, 1>{});
            if (scored && i < end) fetch_scores<NT>(x, p, own, tile_at(i), warp, lane);
        }
        const auto meet = [&] { made = (made & 2) | (__syncthreads_or(made & 1) != 0 ? 1 : 0); };
        if constexpr (behind) {
            if (!is_first) add_values(before, parity ^ 1, made_before);
            if (is_last) break;
            copies_wait(0);  // K of the next tile
            meet();          // weights are there, V has been read
            if (!is_first) copy_rows(v_stage, tile.region->v, tile);
        } else {
            copies_wait(1);  // V of this tile
            meet();          // weights are there
            add_values(tile, parity, made);
            copies_wait(0);   // the next tile, or its K
            __syncthreads();  // V has been read
            if (!alternates && i < end) {
                next = tile_at(i);
                copy_rows(v_stage, next.region->v, next);
            }
        }
        copies_commit();
    }
    if constexpr (behind) __syncthreads();

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
        own.scales[0][row] = sum > 0.0f ? by * inverse : 0.0f;
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
            const float by = own.scales[0][row];
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

// kernel_8.cu and its like; NT as above.
template <int NT>
cudaError_t launch_mla_rows(const MlaArgs& args, int items, cudaStream_t stream);

}  // namespace lkv::cuda
