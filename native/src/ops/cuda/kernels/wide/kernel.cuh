// Attention of up to 32 query rows on a stored K of any width: many query heads that share one latent, or a few tokens.
// As in decode/ slots are the rows of both products; here the warps of a thread block share a tile:
//
//   scores    every warp dequantizes 16 slots of K (or its part of their channels) once and multiplies them with all queries,
//             which lie in shared memory in the order of the products' operands
//   softmax   by query row over the tile: online maximum and sum, weights as f16
//   values    every warp dequantizes its 64-channel blocks of V for all slots of the tile; sums stay in registers
//
// A step takes K of one tile and V of the one before, with two barriers: behind the scores, when K's buffer is free, and behind
// softmax and values, when V's is. With three and one phase behind the other a latent of 1024 took 143 us a layer at 65536 slots in
// f16, now 110.
//
// Rows of f16 are operands as they lie: matrix loads, channels in their order. Sixteen warps hide each other's chains of load,
// dequantize, product: with eight, joint latents of 512 took 72 us a layer at 65536 slots in q4, and 96 in f16.
#pragma once

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/wide/stages.cuh"

namespace lkv::cuda {

// NT: 8-row blocks of queries, 2 or 4. NB: 64-channel blocks of V per warp. Kind: as in with_chunk. Of a short cache with 32 query rows two
// thread blocks take 16 rows of a part each, see Parts.
template <int NT, int NB, int Kind>
__global__ void __launch_bounds__(n_wide_threads, 1)
    wide_kernel(const __grid_constant__ WideArgs p, const __grid_constant__ WideLayout plan) {
    constexpr int R = 8 * NT;
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ WideShared own;
    let_next_start();
    auto* const sources = reinterpret_cast<WideSource*>(shared);  // [n_regions][K, V]
    auto* const chunks = reinterpret_cast<Chunk*>(shared + plan.chunks);
    const WorkItem item(p, blockIdx.x);

    // Nothing here depends on an earlier kernel of the step. Every warp at its own: what it waits for comes at the same time.
    const SlotCounts n_slots(p);
    constexpr int row_thread = n_wide_threads - 32;
    const int row = static_cast<int>(threadIdx.x) - row_thread;
    if (row >= 0 && row < R) {
        const int of_item = blockIdx.y * R + row;
        own.row_at[row] = of_item < item.n_rows ? item.row_at(p, of_item) : -1;
        own.rows[row] = load_query_row(p, own.row_at[row]);
    }
    load_chunks<n_wide_threads>(p, item, chunks);
    const Parts parts(p, n_slots);
    WideShare share;
    const int part = static_cast<int>(parts.halves ? blockIdx.z / 2 : blockIdx.z);
    if (part >= parts.count) return;
    if (threadIdx.x == 0) {
        own.part = part;
        own.parts = parts.count;
    }
    share.own_row = parts.halves ? static_cast<int>(blockIdx.z % 2) * (R / 2) : 0;
    share.tile = parts.tile;
    share.begin = parts.begin(part);
    share.n_tiles = parts.begin(part + 1) - share.begin;
    constexpr int source_thread = n_wide_threads - 64;
    const int source = static_cast<int>(threadIdx.x) - source_thread;
    if (source >= 0 && source < 2 * p.n_regions) {
        const int r = source / 2;
        const bool is_k = source % 2 == 0;
        const RegionArgs& region = p.regions[r];
        WideSource from;
        from.group = is_k ? region.k_groups[item.k_group] : region.v_groups[item.v_group];
        from.row_bytes = is_k ? region.k_row_bytes : region.v_row_bytes;
        from.page = is_k ? region.k_page : region.v_page;
        from.rows = is_k ? region.k_rows : region.v_rows;
        from.seq = region.seq;
        from.pos = region.pos;
        from.n_slots = r == 0 ? n_slots.of[0] : (r == 1 ? n_slots.of[1] : n_slots.of[2]);
        from.tiles_before = parts.tiles_before(r);
        from.whole = copied_whole(from.row_bytes, from.group) ? 1 : 0;
        // each region's own: the largest, by which tiles are laid out, need be no multiple of 16
        from.pitch = from.whole != 0 ? static_cast<int>(from.row_bytes) : pitch_of(static_cast<int>(from.group.bytes));
        sources[source] = from;
    }
    if (static_cast<int>(threadIdx.x) < 2 * p.stages) {
        Arrivals(&own.arrivals[threadIdx.x % 2][threadIdx.x / 2]).init();
    }
    __syncthreads();
    wait_for_previous();
    if constexpr (NT == 4) {
        if (parts.halves) {
            attend_part<2, NB, Kind>(p, plan, share, shared, own);
            return;
        }
    }
    attend_part<NT, NB, Kind>(p, plan, share, shared, own);
}

}  // namespace lkv::cuda
