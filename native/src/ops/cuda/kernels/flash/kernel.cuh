// Attention of many query rows to full f16 rows: a prompt, or what expand/ makes of latents. A thread block takes 128 query rows of one KV
// head and a part of the sequence, which it walks in tiles of 64 slots:
//
//   copy     K and V to shared memory, asynchronously, four tiles ahead
//   scores   a warpgroup: 64 rows x 64 slots, S = Q · Kᵀ, queries in registers
//   values   of the tile before, O += P · V, weights in registers
//   softmax  online, in registers, while the values are added up
//
// mma.sync reads K and V from shared memory once for 16 query rows, and waits for that; warpgroups read them once for 64.
#pragma once

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/flash/stages.cuh"

namespace lkv::cuda {

template <int D, bool IN_TILES>
__global__ void __launch_bounds__(n_threads, 1) flash_kernel(const __grid_constant__ FlashArgs p) {
    using Block = FlashBlock<D, IN_TILES>;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Sight sight;
    __shared__ FlashRegion regions[max_regions];
    __shared__ uint64_t arrivals[flash_stages];
    const WorkItem item(p, blockIdx.x);
    let_next_start();
    wait_for_previous();
    const Parts parts(p);
    const int split = static_cast<int>(blockIdx.z);
    if (split >= parts.count) return;
    // the last rows see most slots: they begin first
    const int first_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * flash_rows;
    Block block{p, item, parts, shared, sight, regions, arrivals, first_row, split};
    block.set_up();
    typename Block::Rows rows;
    typename Block::Queries q;
    typename Block::Sums acc = {};
    FlashState state;
    block.read_rows(rows, q);
    if (p.carry.before != 0) block.take_sums(state, acc);
    block.walk(rows, q, state, acc);
    block.leave(state, acc);
}

}  // namespace lkv::cuda
