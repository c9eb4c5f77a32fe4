// The MLA kernel of one region whose rows have scales, few query rows: what a decoded token of a default file takes. The steps are those of
// kernel.cuh, V's product beside the next tile's softmax. There is no other format in it: a layer's weights evict what a kernel's
// instructions are read from, and half of them are read sooner.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/mla/bare_products.cuh"
#include "ops/cuda/kernels/mla/block.cuh"
#include "ops/cuda/kernels/mla/weights.cuh"

namespace lkv::cuda {

// copy_rows, a row by half a warp or a whole one (most_bare_bytes). Tiles begin at a multiple of 16 bytes from the region's first row.
__device__ inline void copy_row_tile(uint8_t* stage, const MlaSide& side, const MlaTile& tile) {
    const auto row_bytes = static_cast<int>(side.row_bytes);
    const auto bytes = static_cast<int>(side.bytes);
    const auto lead = static_cast<int>(side.lead);
    const int lanes_bits = side.pieces <= 16 ? 4 : 5;
    const int thread = static_cast<int>(threadIdx.x);
    const int piece = 16 * (thread & ((1 << lanes_bits) - 1));
    const int between = side.pitch - row_bytes;
    const uint8_t* const from = side.rows + static_cast<int64_t>(tile.first) * row_bytes - lead;
    const int step = mla_threads >> lanes_bits;
#pragma unroll 4
    for (int row = thread >> lanes_bits; row < tile.valid; row += step) {
        const int begin = lead + row * row_bytes;
        const int at = (begin & ~15) + piece;
        if (at < begin + bytes) copy_async<16>(stage + at + row * between, from + at);
    }
}

// NT: blocks of eight query rows. U: units of V that a warp sums.
template <int NT, int U>
__global__ void __launch_bounds__(mla_threads, 1)
    bare_mla_kernel(const __grid_constant__ MlaArgs p, const __grid_constant__ MlaLayout layout) {
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
    auto* const query_sums = reinterpret_cast<float*>(v_stage + layout.v_stage);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;

    const MlaSlots n_slots(p);
    const MlaSteps steps(p, n_slots);
    const int part = static_cast<int>(blockIdx.z);
    if (part >= steps.count) return;
    const int begin = steps.begin(part);
    const int end = steps.begin(part + 1);
    const auto scales_of = [&](int parity) { return MlaScales(all_scales, p.mla.tile, parity); };
    set_up(p, steps, n_slots, -1, own, units);
    __syncthreads();
    wait_for_previous();
    const MlaRegion& region = own.regions[0];
    const auto tile_at = [&](int step) { return MlaTile(region, step, end, n_slots.of[0], p.mla.tile / step_slots); };
    MlaTile tile = tile_at(begin);
    if (begin < end) {
        copy_marks(own.marks[0], scales_of(0), tile);
        copy_row_tile(k_stage, region.k, tile);
        copies_commit();
        copy_row_tile(v_stage, region.v, tile);
    }
    copies_commit();
    load_bare_queries<NT>(p, own, units, queries, query_sums, scores);
    copies_wait(1);
    __syncthreads();

    BareSums<NT, U> sums;
    MlaState state[warp_rows<NT>];
    const MlaUnit* const v_units = units + most_units;
    const auto weights_of = [&](int parity) { return weights + parity * 8 * NT * p.mla.tile; };
    int made = 0;
    // Sums are of the tile before, so there is one step more.
#pragma unroll 1
    for (int i = begin, parity = 0; begin < end; parity ^= 1) {
        const int slots_before = tile.valid;
        const int made_before = made;
        const bool is_first = i == begin;
        const bool is_last = i == end;
        if (!is_last) {
            tile = tile_at(i);
            i = tile.next;
            score_bare_tile<NT>(region.k, tile, k_stage, units, queries, query_sums, scores, warp, lane);
        }
        copies_wait(0);   // V of the tile before
        __syncthreads();  // scores are there, K has been read
        if (!is_last) {
            if (i < end) {
                const MlaTile next = tile_at(i);
                copy_marks(own.marks[parity ^ 1], scales_of(parity ^ 1), next);
                copy_row_tile(k_stage, region.k, next);
            }
            copies_commit();
            keep_scales(scales_of(parity), own.marks[parity], tile);
            const auto make = [&](auto steps) __attribute__((always_inline)) {
                constexpr int Steps = decltype(steps)::value;
                RowScores<NT> x;
                load_scores<NT, Steps>(x, scores, warp, lane);
                return make_weights<NT, Steps, false>(p, own, parity, tile, x, weights_of(parity), state, warp, lane);
            };
            made = tile.slots == 128  ? make(std::integral_constant<int, 4>{})
                   : tile.slots == 64 ? make(std::integral_constant<int, 2>{})
                                      : make(std::integral_constant<int, 1>{});
        }
        if (!is_first) {
            if (made_before != 0) sums.rescale(own.scales[parity ^ 1], lane);
            sum_bare_tile<NT, U>(sums, region.v, slots_before, v_stage, v_units, weights_of(parity ^ 1),
                                 scales_of(parity ^ 1), warp, lane);
        }
        if (is_last) break;
        copies_wait(0);                              // K of the next tile
        made = __syncthreads_or(made) != 0 ? 1 : 0;  // weights are there, V has been read
        if (!is_first) copy_row_tile(v_stage, region.v, tile);
        copies_commit();
    }
    __syncthreads();

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
        own.scales[0][row] = sum > 0.0f ? 1.0f / sum : 0.0f;
        if (at >= 0) reinterpret_cast<float2*>(p.partial_ml)[first_row + at] = make_float2(state[k].top, sum);
    }
    __syncthreads();
    const int width = 64 * p.v_blocks;
#pragma unroll
    for (int u = 0; u < U; u++) {
        const int unit = warp * U + u;
        const int channel = unit_channels * unit;
        if (channel >= width) continue;
        BareLevels levels{};
        if (unit < region.v.n_units) {
            with_scaled_bits(v_units[unit].kind,
                             [&](auto bits) { levels = BareLevels::of<decltype(bits)::value>(lane); });
        }
        const bool follows = u == 1 && are_pair(v_units, unit - 1, region.v.n_units);
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int row = 8 * n + 2 * (lane % 4) + e;
                const int at = own.rows[row].at;
                if (at < 0) continue;
                const float by = own.scales[0][row];
                const float of_weights = follows ? sums.weights[0][n][e] : sums.weights[u][n][e];
                const auto pair = [&](int m) {
                    const float first = levels.value(sums.codes[u][m][n][e], of_weights, 2 * m);
                    const float second = levels.value(sums.codes[u][m][n][e + 2], of_weights, 2 * m + 1);
                    return bits(__floats2half2_rn(first * by, second * by));
                };
                __half* const to = reinterpret_cast<__half*>(p.partial) + (first_row + at) * width + 4 * (lane / 4);
                *reinterpret_cast<uint2*>(to + channel) = make_uint2(pair(0), pair(1));
            }
        }
    }
}

}  // namespace lkv::cuda
