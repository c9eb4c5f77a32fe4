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

template <int MB, int NB, bool REBUILD, bool BLOCKS = false>
cudaError_t launch_one(const DirectArgs& args, cudaStream_t stream) {
    constexpr auto kernel = attn_kernel<MB, NB, REBUILD, BLOCKS>;
    constexpr int rows = 16 * MB;
    const int bytes = DirectLayout(args, rows).total(args, rows);
    const int n_rows = args.n_tokens * args.unit * (args.n_head / args.n_kv);
    const dim3 grid(args.n_kv / args.unit, (n_rows + rows - 1) / rows, args.n_split);
    return launch_next(kernel, grid, n_threads, static_cast<size_t>(bytes), stream, args);
}

template <bool REBUILD>
cudaError_t launch_instance(const DirectArgs& args, cudaStream_t stream) {
    const int key = args.rows * 10 + args.blocks;
    switch (key) {
        case 161:
            return launch_one<1, 1, REBUILD>(args, stream);
        case 162:
            return launch_one<1, 2, REBUILD>(args, stream);
        case 164:
            return launch_one<1, 4, REBUILD>(args, stream);
        case 321:
            return launch_one<2, 1, REBUILD>(args, stream);
        case 322:
            return launch_one<2, 2, REBUILD>(args, stream);
        case 641:
            return launch_one<4, 1, REBUILD>(args, stream);
        default:
            return cudaErrorInvalidConfiguration;
    }
}

}  // namespace lkv::cuda
