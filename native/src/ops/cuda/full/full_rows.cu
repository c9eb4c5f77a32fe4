#include "ops/cuda/full/full_rows.h"

#include <cuda_fp16.h>

#include <algorithm>

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/rows/rows.cuh"
#include "ops/cuda/step/rope.cuh"

namespace lkv::cuda {

namespace {

constexpr int full_threads = 256;
constexpr int full_warps = full_threads / 32;

// grid: slots x {region 0, region 1, own K, own V}. A warp has a head at a time.
__global__ void __launch_bounds__(full_threads)
    full_rows_kernel(const __grid_constant__ FullRows rows, const __grid_constant__ Problem p) {
    __shared__ __half heads[full_warps][most_head_dim];
    let_next_start();
    wait_for_previous();
    const int slot = static_cast<int>(blockIdx.x);
    const int source = static_cast<int>(blockIdx.y);
    const bool own = source >= max_regions - 1;
    const bool is_k = source < max_regions;
    const FullRows::Region& region = rows.regions[own ? 0 : source];
    if (own ? slot >= rows.n_own || rows.own_k == nullptr
            : region.rows == nullptr || source >= p.n_regions || slot >= p.n_slots[source]) {
        return;
    }
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int pos = own ? rows.own_pos[slot] : region.pos[slot];
    uint8_t* const to = (own ? (is_k ? rows.own_k_to : rows.own_v_to) : region.to) +
                        static_cast<int64_t>(slot) * p.n_kv * p.head_dim * 2;
    const float* const from = (is_k ? rows.own_k : rows.own_v) + slot * rows.own_stride;
    for (int head = warp; head < p.n_kv; head += full_warps) {
        __half* const x = heads[warp];
        const SegmentLayout segment = own ? SegmentLayout{} : region.segments[head];
        const uint8_t* const stored = own ? nullptr : region.rows + row_offset(slot, region.page, region.row_bytes);
        for (int d = lane; d < p.head_dim; d += 32) {
            x[d] = __float2half_rn(own ? from[head * p.head_dim + d] : value_at(segment, stored, d));
        }
        __syncwarp();
        if (is_k && rows.raw) finish_key<most_head_dim>(p, head, pos, x, x, lane);
        __syncwarp();
        auto* const out = reinterpret_cast<__half*>(to) + head * p.head_dim;
        for (int d = lane; d < p.head_dim; d += 32) out[d] = x[d];
        __syncwarp();
    }
}

}  // namespace

cudaError_t make_full_rows(const FullRows& rows, const Problem& args, cudaStream_t stream) {
    int slots = rows.own_k != nullptr ? rows.n_own : 0;
    for (const FullRows::Region& region : rows.regions)
        slots = std::max(slots, region.rows != nullptr ? region.capacity : 0);
    if (slots == 0) return cudaSuccess;
    const dim3 grid(static_cast<unsigned>(slots), rows.own_k != nullptr ? max_regions + 1 : max_regions - 1);
    return launch_next(full_rows_kernel, grid, full_threads, 0, stream, rows, args);
}

}  // namespace lkv::cuda
