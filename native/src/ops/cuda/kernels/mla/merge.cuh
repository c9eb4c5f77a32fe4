// The parts' sums become the result: merged, and multiplied with B_v. A thread block has 64 or 128 channels of the latent V, four query
// rows of one KV head; those of the same rows add up each other's results, as a cluster where there are clusters.
//
// Beside full rows of exact windows the parts that these left join: their maxima and sums of weights, and behind the product their sums.
//
// All of it is waited for, so the factor and addresses come before attention ends, and behind it one trip to the L2 cache brings
// maxima and the first parts.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/gpu/bulk_copy.cuh"
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/gpu/cluster.cuh"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/gpu/pair.cuh"
#include "ops/cuda/kernels/mla/tiles.cuh"
#include "ops/cuda/softmax/halve.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

constexpr int mla_merge_threads = 512;
constexpr int merged_rows = 4;
constexpr int most_merge_dims = 256;

// Four or eight f16 channels.
template <int Per>
using Channels = std::conditional_t<Per == 1, uint2, uint4>;

template <int Per>
__device__ inline void add_part(float (&sum)[4 * Per], float share, const Channels<Per>& x) {
    const auto* const pairs = reinterpret_cast<const __half2*>(&x);
#pragma unroll
    for (int i = 0; i < 2 * Per; i++) {
        const float2 of = __half22float2(pairs[i]);
        sum[2 * i] += share * of.x;
        sum[2 * i + 1] += share * of.y;
    }
}

// Maxima and sums of a row's parts, a lane each and every 32nd after it.
constexpr int held_parts = (most_parts + 31) / 32;

__device__ __forceinline__ void load_maxima(float2 (&of)[held_parts], const CutProblem& p, int at, int count,
                                            int lane) {
    const int64_t all_rows = static_cast<int64_t>(p.n_tokens) * p.n_head;
    const auto* const maxima = reinterpret_cast<const float2*>(p.partial_ml) + at;
#pragma unroll
    for (int k = 0; k < held_parts; k++) {
        const int part = 32 * k + lane;
        of[k] = part < count ? __ldcg(maxima + part * all_rows) : make_float2(-INFINITY, 0.0f);
    }
}

__device__ __forceinline__ float highest(const float2 (&of)[held_parts]) {
    float top = of[0].x;
#pragma unroll
    for (int k = 1; k < held_parts; k++) top = fmaxf(top, of[k].x);
    return warp_max(top);
}

// What weights relative to a part's own maximum count for, to of[k].x; returns this lane's weights.
__device__ __forceinline__ float share_out(float2 (&of)[held_parts], float top) {
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < held_parts; k++) {
        const float share = of[k].y > 0.0f ? power_of_two(of[k].x - top) : 0.0f;
        total += of[k].y * share;
        of[k].x = share;
    }
    return total;
}

// grid: KV heads x blocks of 64·Per channels x groups of four query rows. Per: 1 or 2. Joins: with the parts of `full`.
template <int Per, bool Joins>
__global__ void __launch_bounds__(mla_merge_threads, 1)
    mla_merge_kernel(const __grid_constant__ MlaArgs p, const __grid_constant__ CutProblem full) {
    let_next_start();
    __shared__ float shares[merged_rows][Joins ? most_parts : 1];  // of the full rows' parts, normalised
    __shared__ int full_rows[merged_rows];
    constexpr int width = 64 * Per;
    __shared__ float4 z[width];                                 // merged: of a channel its rows
    __shared__ float sent[merged_rows * most_merge_dims + 16];  // of each block in turn, rounded up
    __shared__ uint64_t arrived;
    __shared__ bool last;
    const MlaSlots counts(p);
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const int warp = thread / 32;
    const int head_kv = static_cast<int>(blockIdx.x);
    const int block = static_cast<int>(blockIdx.y);
    const int blocks = static_cast<int>(gridDim.y);
    const bool together = cluster_blocks() > 1;
    const int n_pairs = p.head_dim / 2;
    const int n_results = merged_rows * p.head_dim;
    const int own = (n_results + blocks - 1) / blocks;  // results that this thread block adds up
    if (together) {
        if (thread == 0) {
            Arrivals(&arrived).init();
            const int mine = min(own, n_results - block * own);
            Arrivals(&arrived).announce(static_cast<uint32_t>(max(0, mine) * blocks * 4));
        }
        cluster_arrive_relaxed();
    }
    const int rep = small_quotient(p.n_head, p.n_kv);
    const int n_rows = p.n_tokens * rep;
    const int all_rows = p.n_tokens * p.n_head;
    const auto row_at = [&](int row) {
        const int token = small_quotient(row, rep);
        return token * p.n_head + head_kv * rep + row - token * rep;
    };

    // What a lane multiplies: channels eighth + 8k with pair lane % 4 of four pairs of dimensions.
    const int eighth = lane / 4;
    constexpr int per_lane = width / 8;
    const int channel = width * block + eighth;
    __half2 b[per_lane];
    const auto* const factor = reinterpret_cast<const __half2*>(p.v_b) +
                               (static_cast<int64_t>(head_kv) * p.v_rank_max + channel) * n_pairs + lane % 4;
    const auto load_factor = [&](int pair) {
#pragma unroll
        for (int k = 0; k < per_lane; k++) {
            b[k] = pair < n_pairs && channel + 8 * k < p.v_rank_max
                       ? __ldg(factor + static_cast<int64_t>(8 * k) * n_pairs + pair)
                       : __half2{};
        }
    };
    load_factor(4 * warp);

    // What it merges: 4·Per channels of its warp's row, of parts eighth + 8k.
    const int row = static_cast<int>(blockIdx.z) * merged_rows + warp / 4;
    const bool exists = row < n_rows;
    const int count = p.mla.apart != 0 ? (exists ? ApartShares(p).parts_of(p, small_quotient(row, rep)) : 0)
                                       : MlaSteps(p, counts).count;
    const int at = exists ? row_at(row) : 0;
    const int first_channel = width / 4 * (warp % 4) + 4 * Per * (lane % 4);
    const int all = 64 * p.v_blocks;
    const __half* const from = reinterpret_cast<const __half*>(p.partial) +
                               (static_cast<int64_t>(eighth) * all_rows + at) * all + width * block + first_channel;
    const int64_t step = int64_t{8} * all_rows * all;
    const bool has = exists && width * block + first_channel < all;
    const auto load = [&](int k) {
        return has && eighth + 8 * k < count ? __ldcg(reinterpret_cast<const Channels<Per>*>(from + k * step))
                                             : Channels<Per>{};
    };
    const int full_count = Joins ? Parts(full).count : 0;
    constexpr int ahead = 6;
    wait_for_previous();

    float2 of[held_parts];
    float2 beside[held_parts];
    Channels<Per> x[ahead];
    load_maxima(of, p, at, exists ? count : 0, lane);
    if constexpr (Joins) load_maxima(beside, full, at, exists ? full_count : 0, lane);
#pragma unroll
    for (int k = 0; k < ahead; k++) x[k] = load(k);
    float top = highest(of);
    if constexpr (Joins) top = fmaxf(top, highest(beside));
    float total = share_out(of, top);
    if constexpr (Joins) total += share_out(beside, top);
#pragma unroll
    for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(0xffffffffu, total, o);
    const float inverse = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
#pragma unroll
    for (int k = 0; k < held_parts; k++) of[k].x *= of[k].y;  // parts are means
    if (Joins && warp % 4 == 0) {
#pragma unroll
        for (int k = 0; k < held_parts; k++) {
            if (32 * k + lane < full_count) shares[warp / 4][32 * k + lane] = beside[k].x * inverse;
        }
        if (lane == 0) full_rows[warp / 4] = at;
    }
    const auto share_of = [&](int k) { return __shfl_sync(0xffffffffu, of[k / 4].x, eighth + 8 * (k % 4)); };
    float sum_z[4 * Per] = {};
#pragma unroll
    for (int k = 0; k < ahead; k++) add_part<Per>(sum_z, share_of(k), x[k]);
#pragma unroll
    for (int k0 = ahead; 8 * k0 < most_parts; k0 += ahead) {
        if (8 * k0 >= count) break;
#pragma unroll
        for (int k = 0; k < ahead; k++) x[k] = load(k0 + k);
#pragma unroll
        for (int k = 0; k < ahead; k++) {
            if (k0 + k < 4 * held_parts) add_part<Per>(sum_z, share_of(k0 + k), x[k]);
        }
    }
    // lanes of eight parts: each is left with one or, of half of them, the same channel
    const float merged = sum_of_eight(sum_z, lane) * inverse;
    const int bits = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;  // counted by bits 4, 3 and 2
    const int left = Per == 2 ? bits : bits / 2;
    reinterpret_cast<float*>(z + first_channel + left)[warp / 4] = exists ? merged : 0.0f;
    __syncthreads();

    // What the full rows add to dimension d of a row.
    const auto joined = [&](int of_row, int d) {
        float sum = 0.0f;
        if constexpr (Joins) {
            const float* const sums = full.partial + static_cast<int64_t>(full_rows[of_row]) * 64 * full.v_blocks + d;
#pragma unroll 4
            for (int s = 0; s < full_count; s++) {
                const float share = shares[of_row][s];
                if (share > 0.0f) sum += share * __ldcg(sums + static_cast<int64_t>(s) * all_rows * 64 * full.v_blocks);
            }
        }
        return sum;
    };
    float first_joined = 0.0f;  // of this thread's first result
    if (together && thread < own && block * own + thread < n_results) {
        const int of_row = (block * own + thread) / p.head_dim;
        first_joined = joined(of_row, block * own + thread - of_row * p.head_dim);
    }

    float* const scratch = reinterpret_cast<float*>(reinterpret_cast<__half*>(p.partial) +
                                                    static_cast<int64_t>(p.n_split) * all_rows * all);
    if (together) cluster_wait();  // the others' barriers are there
#pragma unroll 1
    for (int pair = 4 * warp; pair < n_pairs; pair += mla_merge_threads / 8) {
        if (pair != 4 * warp) load_factor(pair);
        float sum[2 * merged_rows] = {};  // [row][of the pair]
#pragma unroll
        for (int k = 0; k < per_lane; k++) {
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
        const float result = sum_of_eight(sum, lane);
        const int of_row = bits / 2;
        const int d = 2 * (pair + lane % 4) + bits % 2;
        const int index = of_row * p.head_dim + d;
        const int to_row = static_cast<int>(blockIdx.z) * merged_rows + of_row;
        if (together) {
            const int owner = index / own;
            send(in_block(sent + block * own + index - owner * own, owner), result, in_block(&arrived, owner));
        } else if (blocks == 1) {
            if (to_row < n_rows)
                p.out[static_cast<int64_t>(row_at(to_row)) * p.head_dim + d] = result + joined(of_row, d);
        } else if (to_row < n_rows) {
            scratch[(static_cast<int64_t>(block) * all_rows + row_at(to_row)) * p.head_dim + d] = result;
        }
    }
    if (blocks == 1) return;
    if (together) {
        Arrivals(&arrived).wait(0);
        for (int i = thread; i < own; i += mla_merge_threads) {
            const int index = block * own + i;
            const int of_row = index / p.head_dim;
            const int to_row = static_cast<int>(blockIdx.z) * merged_rows + of_row;
            if (index >= n_results || to_row >= n_rows) continue;
            const int d = index - of_row * p.head_dim;
            float sum = i == thread ? first_joined : joined(of_row, d);
            for (int k = 0; k < blocks; k++) sum += sent[k * own + i];
            p.out[static_cast<int64_t>(row_at(to_row)) * p.head_dim + d] = sum;
        }
        return;
    }
    if (!is_last(p.done + blockIdx.z * p.n_kv + blockIdx.x, static_cast<unsigned>(blocks), last)) return;
    for (int i = thread; i < n_results; i += mla_merge_threads) {
        const int of_row = i / p.head_dim;
        const int to_row = static_cast<int>(blockIdx.z) * merged_rows + of_row;
        if (to_row >= n_rows) continue;
        const int64_t to = static_cast<int64_t>(row_at(to_row)) * p.head_dim + i - of_row * p.head_dim;
        float sum = joined(of_row, i - of_row * p.head_dim);
        for (int k = 0; k < blocks; k++) sum += __ldcg(scratch + static_cast<int64_t>(k) * all_rows * p.head_dim + to);
        p.out[to] = sum;
    }
}

}  // namespace lkv::cuda
