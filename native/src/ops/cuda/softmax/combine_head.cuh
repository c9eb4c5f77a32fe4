// How the attention of most decode steps ends (compute capability 9.0): the parts of one KV head's few query rows are merged and
// multiplied with B_v. A thread block has 64 channels of the latent V; those of a head are a cluster and add up each other's results.
//
// All of it is waited for, and its instructions have to come from device memory, where the attention's rows and the weights have
// displaced them. So where everything lies is found out before the attention ends; behind it one trip to the L2 cache brings maxima
// and sums, lanes exchange them without shared memory, and stores to the other thread blocks count themselves, since a barrier that
// orders stores fences all memory of the GPU. Behind the end some 300 instructions are left where combine_wide_kernel has 750:
// 2 to 3 us a layer less.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/gpu/bulk_copy.cuh"
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/gpu/cluster.cuh"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/gpu/pair.cuh"
#include "ops/cuda/softmax/halve.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

constexpr int combine_head_threads = 512;
constexpr int combined_rows = 4;    // of a KV head, at most
constexpr int combined_dims = 128;  // of a row
constexpr int few_parts = 40;       // a lane has sums of five parts at once

// grid: KV heads x 64-channel blocks, which are a cluster: 1, 2, 4 or 8. many: there may be more than few_parts
template <bool many>
__global__ void __launch_bounds__(combine_head_threads, 2) combine_head_kernel(const __grid_constant__ CutProblem p) {
    let_next_start();
    const SlotCounts counts(p);                            // on their way meanwhile
    __shared__ float4 z[64];                               // merged, a channel's query rows
    __shared__ float sent[combined_rows * combined_dims];  // a share of the results, by each block of the cluster
    __shared__ uint64_t arrived;
    const int blocks = static_cast<int>(gridDim.y);
    const int rank = static_cast<int>(blockIdx.y);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
        Arrivals(&arrived).init();
        Arrivals(&arrived).announce(sizeof(sent));
    }
    cluster_arrive_relaxed();
    const int head_kv = static_cast<int>(blockIdx.x);
    const int lane = thread % 32;
    const int warp = thread / 32;
    const int eighth = lane / 4;

    // What a lane multiplies: channels eighth + 8k with pair lane % 4 of the warp's four pairs of dimensions.
    constexpr int n_pairs = combined_dims / 2;
    const int channel = 64 * rank + eighth;
    const auto* const factor = reinterpret_cast<const __half2*>(p.v_b) +
                               (static_cast<int64_t>(head_kv) * p.v_rank_max + channel) * n_pairs + 4 * warp + lane % 4;
    __half2 b[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        b[k] = channel + 8 * k < p.v_rank_max ? __ldg(factor + 8 * k * n_pairs) : __half2{};
    }
    const Parts parts(p, counts);

    // What it merges: four channels of its warp's row, of parts eighth + 8k.
    const int rep = small_quotient(p.n_head, p.n_kv);
    const int n_rows = p.n_tokens * rep;
    const int all_rows = p.n_tokens * p.n_head;
    const auto row_at = [&](int row) {
        const int token = small_quotient(row, rep);
        return token * p.n_head + head_kv * rep + row - token * rep;
    };
    const int row = warp / 4;
    const int at = row_at(row);
    const int count = row < n_rows ? parts.count : 0;
    const int width = 64 * p.v_blocks;
    const int first_channel = 16 * (warp % 4) + 4 * (lane % 4);
    const float2* const maxima = kept(reinterpret_cast<const float2*>(p.partial_ml) + lane * all_rows + at);
    const float* const from =
        kept(p.partial + static_cast<int64_t>(eighth * all_rows + at) * width + 64 * rank + first_channel);
    const auto maxima_step = 32u * static_cast<uint32_t>(all_rows);
    const auto step = 8u * static_cast<uint32_t>(all_rows * width);
    // of the four, the one that this lane and the one four further have merged
    const int merged_channel = first_channel + lane / 16 * 2 + lane / 8 % 2;
    const bool exists = 64 * rank + merged_channel < p.v_rank_max;
    float* const merged_at = reinterpret_cast<float*>(z + merged_channel) + row;

    // Results, [16 warps][rows][of a pair][4 pairs] as lanes have them, a thread one: `own` of them are added up by each block.
    static_assert(combine_head_threads == combined_rows * combined_dims);
    const int own = combined_rows * combined_dims / blocks;
    const int owner = thread / own;
    const uint32_t there = in_block(sent + rank * own + thread - owner * own, owner);
    const uint32_t arrivals = in_block(&arrived, owner);
    const int result_at = rank * own + thread;
    const int result_row = result_at / 8 % 4;
    float* const out = kept(p.out + static_cast<int64_t>(row_at(result_row)) * combined_dims +
                            2 * (result_at / 32 * 4 + result_at % 4) + result_at / 4 % 2);
    cluster_wait();
    wait_for_previous();

    constexpr int held = many ? (most_parts + 31) / 32 : 2;
    constexpr int ahead = few_parts / 8;
    static_assert(few_parts <= 32 * 2);
    float2 part[held];  // maximum and sum of parts lane + 32k; then what each counts for
    float4 x[ahead];
    const auto load = [&](int k) {
        return eighth + 8 * k < count ? __ldcg(reinterpret_cast<const float4*>(from + k * step))
                                      : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    };
#pragma unroll
    for (int k = 0; k < held; k++) {
        part[k] = lane + 32 * k < count ? __ldcg(maxima + k * maxima_step) : make_float2(-INFINITY, 0.0f);
    }
#pragma unroll
    for (int k = 0; k < ahead; k++) x[k] = load(k);
    float top = part[0].x;
#pragma unroll
    for (int k = 1; k < held; k++) top = fmaxf(top, part[k].x);
    top = warp_max(top);
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < held; k++) {
        part[k].x = part[k].y > 0.0f ? power_of_two(part[k].x - top) : 0.0f;
        total += part[k].y * part[k].x;
    }
#pragma unroll
    for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(0xffffffffu, total, o);
    const float inverse = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
    float4 sum_z = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto share_of = [&](int k) { return __shfl_sync(0xffffffffu, part[k / 4].x, eighth + 8 * (k % 4)); };
#pragma unroll
    for (int k = 0; k < ahead; k++) add_share(sum_z, share_of(k), x[k]);
    if constexpr (many) {
        constexpr int at_once = 6;
#pragma unroll
        for (int k0 = ahead; 8 * k0 < most_parts; k0 += at_once) {
            if (8 * k0 >= count) break;
            float4 more[at_once];
#pragma unroll
            for (int k = 0; k < at_once; k++) more[k] = load(k0 + k);
#pragma unroll
            for (int k = 0; k < at_once; k++) add_share(sum_z, share_of(k0 + k), more[k]);
        }
    }
    float merged[4] = {sum_z.x, sum_z.y, sum_z.z, sum_z.w};
    const float sum_of_parts = sum_of_eight(merged, lane);
    if (lane / 4 % 2 == 0) *merged_at = exists ? sum_of_parts * inverse : 0.0f;
    __syncthreads();

    float sum[2 * combined_rows] = {};  // [row][of the pair]
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float2 by = __half22float2(b[k]);
        const float4 rows = z[eighth + 8 * k];
        sum[0] += rows.x * by.x;
        sum[1] += rows.x * by.y;
        sum[2] += rows.y * by.x;
        sum[3] += rows.y * by.y;
        sum[4] += rows.z * by.x;
        sum[5] += rows.z * by.y;
        sum[6] += rows.w * by.x;
        sum[7] += rows.w * by.y;
    }
    float result = sum_of_eight(sum, lane);
    if (blocks > 1) {  // else there is no cluster to send it to
        send(there, result, arrivals);
        if (thread >= own) return;
        Arrivals(&arrived).wait(0);
        result = 0.0f;
#pragma unroll 1
        for (int k = 0; k < blocks; k++) result += sent[k * own + thread];
    }
    if (result_row < n_rows) *out = result;
}

}  // namespace lkv::cuda
