// Attention of what the decode, the wide and the prefill kernel do not take (plan.cpp): a few more rows than fit a decode step,
// latents too wide for a tile in shared memory. One thread block takes 16·MB query rows (tokens x the query heads that share
// this K and this V) and one part of the sequence, and walks it in tiles of slots:
//
//   copy      the tile's bytes as they are stored, asynchronously, `stages` tiles ahead
//   rebuild   (K rebuild only) latent tile -> k, bias, norm, RoPE, into shared memory as f16 rows
//   scores    every warp dequantizes its slots x its 64-channel blocks of K in registers and multiplies them with its part
//             of the queries, which stays in registers
//   softmax   partial scores of the warps add up, online maximum and sum, weights as f16
//   values    every warp dequantizes its slots x its blocks of V in registers; sums stay in registers
//
// A stored byte is copied once and dequantized once per thread block. Nothing grows with the context. K in blocks of tokens is read by
// instances of their own (BLOCKS), channel by channel, from tiles of whole blocks.
#pragma once

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/direct/stages.cuh"

namespace lkv::cuda {

template <int MB, int NB, bool REBUILD, bool BLOCKS>
__global__ void __launch_bounds__(n_threads, (MB == 1 && NB == 1) ? 2 : 1)
    attn_kernel(const __grid_constant__ DirectArgs p) {
    using Block = DirectBlock<MB, NB, REBUILD, BLOCKS>;
    extern __shared__ __align__(16) uint8_t shared[];
    const DirectLayout plan(p, Block::R);
    const WorkItem item(p, blockIdx.x);
    const int split = blockIdx.z;
    const Parts parts(p);
    if (split >= parts.count) return;
    Block block{p, plan, item, parts, shared, static_cast<int>(blockIdx.y) * Block::R, split};
    let_next_start();
    wait_for_previous();
    load_chunks<n_threads>(p, item, block.chunks);
    for (int i = 0; i < p.stages - 1; i++) block.issue(block.tile_begin + i);
    typename Block::Queries q;
    block.read_queries(q);
    const DirectRow row = block.read_row();
    DirectState state;
    typename Block::Sums acc = {};
    block.clear();
    block.walk(q, row, state, acc);
    block.leave(row, state, acc);
}

}  // namespace lkv::cuda
