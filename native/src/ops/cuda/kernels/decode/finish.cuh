// How a thread block of a decode kernel ends: its sums become one part of its item, or the result, and the last part adds all up. Parts
// of a wide latent V are left to softmax/combine.cu.
#pragma once

#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// Threads of a thread block; 0: as many as the plan chose.
template <int threads>
__device__ inline int block_threads() {
    return threads != 0 ? threads : static_cast<int>(blockDim.x);
}

// z [n_rows][pitch], normalised, to the output; a latent V times B_v first (multiplies). rows_at: where a query row is in the output.
// The loops that run once are rolled, here and below: their instructions come from device memory, where a step's weights
// have displaced them, and fetching 16 bytes for each costs more than running them.
template <int threads, bool multiplies>
__device__ inline void finish(const CutProblem& p, const float* z, int pitch, int n_rows, const int32_t* rows_at) {
    const int n_pairs = p.head_dim / 2;
#pragma unroll 1
    for (int i = threadIdx.x; i < n_rows * n_pairs; i += block_threads<threads>()) {
        const int row = i / n_pairs;
        const int pair = i - row * n_pairs;
        const int64_t to = rows_at[row];
        float2 sum = make_float2(0.0f, 0.0f);
        if (!multiplies || p.v_b == nullptr) {
            sum = *reinterpret_cast<const float2*>(z + row * pitch + 2 * pair);
        } else {
            const int head = static_cast<int>(to % p.n_head);
            const auto* const factor = reinterpret_cast<const __half2*>(p.v_b) +
                                       static_cast<int64_t>(head / (p.n_head / p.n_kv)) * p.v_rank_max * n_pairs + pair;
            // a trip to the L2 cache for 16 channels: 8 took 2 us for 64
#pragma unroll 16
            for (int ch = 0; ch < min(p.v_rank_max, 64 * p.v_blocks); ch++) {  // of what is stored
                const float2 b = __half22float2(__ldg(factor + static_cast<int64_t>(ch) * n_pairs));
                sum.x += z[row * pitch + ch] * b.x;
                sum.y += z[row * pitch + ch] * b.y;
            }
        }
        *reinterpret_cast<float2*>(p.out + to * p.head_dim + 2 * pair) = sum;
    }
}

// all [n_rows]: maximum (base 2) and sum of a row's weights in this part; sum_at(row, d): the row's sums of V relative to that maximum,
// d < width. shared: memory that nobody reads any more but `all` and sum_at; z [n_rows][pitch]: where sum_at's row and d may lie.
// multiplies: with B_v, where softmax/combine.cu does not; merged_apart: it does. By all threads.
template <int threads, bool multiplies, class SumAt>
__device__ inline void end_part(const CutProblem& p, bool merged_apart, const Parts& parts, const WorkItem& item,
                                int split, const int32_t* rows_at, const float2* all, int width, uint8_t* shared,
                                float* z, int pitch, SumAt&& sum_at) {
    const bool apart = merged_apart || p.leaves == Leaves::parts;
    const int64_t all_rows = static_cast<int64_t>(p.n_tokens) * p.n_head;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int warps = block_threads<threads>() / 32;
#pragma unroll 1
    for (int i = threadIdx.x; i < item.n_rows * width; i += block_threads<threads>()) {
        const int row = i / width;
        const int d = i - row * width;
        const float top = all[row].x;
        const float total = all[row].y;
        const float sum = sum_at(row, d);
        const bool whole = parts.count == 1 && !apart;
        const int64_t at = split * all_rows + rows_at[row];
        if (d == 0 && (!whole || p.leaves != Leaves::results)) {
            reinterpret_cast<float2*>(p.partial_ml)[at] = make_float2(top, total);
        }
        if (whole) {
            z[row * pitch + d] = total > 0.0f ? sum / total : 0.0f;
            continue;
        }
        if (d < 64 * p.v_blocks) p.partial[at * 64 * p.v_blocks + d] = sum;
    }
    if (apart) return;
    if (parts.count > 1) {
        // the last part to finish adds all of them up
        __shared__ bool last;
        if (!is_last(p.done + blockIdx.x, static_cast<unsigned>(parts.count), last)) return;
        auto* const weight = reinterpret_cast<float*>(shared);                  // [item.n_rows][count]
        float* const merged = weight + round_up(item.n_rows * parts.count, 4);  // [item.n_rows][pitch]
#pragma unroll 1
        for (int row = warp; row < item.n_rows; row += warps) {
            const auto* const of = reinterpret_cast<const float2*>(p.partial_ml) + rows_at[row];
            float top = -INFINITY;
#pragma unroll 1
            for (int s = lane; s < parts.count; s += 32) top = fmaxf(top, __ldcg(of + s * all_rows).x);
#pragma unroll 1
            for (int o = 16; o > 0; o /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
            float total = 0.0f;
#pragma unroll 1
            for (int s = lane; s < parts.count; s += 32) {
                const float2 part = __ldcg(of + s * all_rows);
                const float share = part.y > 0.0f ? exp2f(part.x - top) : 0.0f;
                weight[row * parts.count + s] = share;
                total += part.y * share;
            }
#pragma unroll 1
            for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(0xffffffffu, total, o);
            const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll 1
            for (int s = lane; s < parts.count; s += 32) weight[row * parts.count + s] *= inverse;
        }
        __syncthreads();
        const int quads = 16 * p.v_blocks;
        const int64_t step = all_rows * quads;
#pragma unroll 1
        for (int i = threadIdx.x; i < item.n_rows * quads; i += block_threads<threads>()) {
            const int row = i / quads;
            const auto* const from =
                reinterpret_cast<const float4*>(p.partial) + rows_at[row] * quads + i - row * quads;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
            for (int s = 0; s < parts.count; s++) {
                add_share(sum, weight[row * parts.count + s], __ldcg(from + s * step));
            }
            *reinterpret_cast<float4*>(merged + row * pitch + 4 * (i - row * quads)) = sum;
        }
        z = merged;
    }
    __syncthreads();
    finish<threads, multiplies>(p, z, pitch, item.n_rows, rows_at);
}

}  // namespace lkv::cuda
