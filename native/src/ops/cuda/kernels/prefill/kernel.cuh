// Attention of many query rows (tokens x the query heads that share this K and this V): prefill. A thread block takes
// 128 / WC rows and one part of the sequence, and walks it in tiles of slots, which it makes f16 matrices once for all rows:
//
//   copy      the tile's bytes as they are stored, asynchronously, ahead
//   make      K and V as f16 rows in shared memory (tile.cuh)
//   scores    every warp 16 rows x its slots
//   softmax   online, in registers
//   values    every warp 16 rows x its channels of V; sums stay in registers
//
// WC = 1: four warps make tiles while eight compute, through two buffers; a row's weights never leave its warp. WC > 1 (wide
// rows, whose sums fill the registers of as many warps): all warps make K, compute scores, make V in the same place, compute
// sums; weights pass through shared memory. Nothing grows with the context.
#pragma once

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/prefill/stages.cuh"

namespace lkv::cuda {

template <int WC, int KQ, int NV, int TILE>
__global__ void __launch_bounds__(prefill_threads(WC), 1) prefill_kernel(const __grid_constant__ PrefillArgs p) {
    using Block = PrefillBlock<WC, KQ, NV, TILE>;
    extern __shared__ __align__(16) uint8_t shared[];
    const PrefillLayout plan(p);
    const PrefillShared own(p, plan, shared);
    const WorkItem item(p, blockIdx.x);
    const int split = blockIdx.z;
    let_next_start();
    wait_for_previous();  // the slots in use too, of expanded rows
    const Parts parts(p);
    if (split >= parts.count) return;
    Block block{p, plan, own, item, parts, static_cast<int>(blockIdx.y) * Block::R, split};
    block.set_up();
    block.view = *own.sight;
    if constexpr (Block::apart) {
        if (block.warp >= n_warps) {
            block.make_tiles();
            return;
        }
    }
    typename Block::Rows rows;
    typename Block::Queries q;
    block.read_rows(rows, q);
    PrefillState state;
    typename Block::Sums acc = {};
    block.walk(rows, q, state, acc);
    block.leave(state, acc);
}

}  // namespace lkv::cuda
