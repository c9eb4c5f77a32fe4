// Attention for few query rows: up to 8 (tokens x the query heads that share this K and this V).
// Slots are the rows of both products and the queries their 8 columns, so that no row of a tensor-core tile is wasted:
//
//   scores [16 slots x 8 queries] = K [16 slots x channels] · qᵀ   (K rebuild: rebuild.cuh makes K first)
//   sums [16 channels x 8 queries] += Vᵀ [16 channels x 16 slots] · weights
//
// Every warp walks slots of its own, with its own copies in flight and its own maximum and sums; nothing waits for another
// warp until the end of a part. A stored byte is copied once and dequantized once, in registers.
#pragma once

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/kernels/decode/stages.cuh"

namespace lkv::cuda {

// Apart: Cut::apart.
template <int KB, int VB, int MT, int Kind, KPath Path, bool Apart>
__global__ void __launch_bounds__(Path == KPath::rebuilt && KB == 1 ? 2 * n_threads : n_threads,
                                  Path != KPath::rebuilt && KB + VB <= 4 ? 2 : 1)
    decode_kernel(const __grid_constant__ DecodeArgs p) {
    using Warp = DecodeWarp<KB, VB, MT, Kind, Path, Apart>;
    extern __shared__ __align__(16) uint8_t shared[];
    let_next_start();
    const Parts parts(p);
    if (Apart && p.late_slots != 0) wait_for_previous();
    const DecodeShare<MT, Apart> share(p, parts);
    if (share.part < 0) return;
    const DecodeLayout plan(p);
    WorkItem item(p, blockIdx.x);
    int first_row = static_cast<int>(blockIdx.z) * decode_rows;
    item.n_rows = min((Apart ? item.unit_heads : item.n_rows) - first_row, decode_rows);
    if constexpr (Apart) first_row += share.token * item.unit_heads;

    // every region's groups and chunks, once for all warps
    auto* const groups = reinterpret_cast<GroupTable*>(shared);
    auto* const chunks = reinterpret_cast<Chunk*>(shared + plan.groups);
    auto* const queries = reinterpret_cast<uint2*>(shared + plan.groups + plan.chunks);
    uint8_t* const own = shared + plan.common() + threadIdx.x / 32 * plan.own;
    [[maybe_unused]] WarpRebuild keys(reinterpret_cast<uint8_t*>(queries), plan, own);
    __shared__ int32_t rows_at[decode_rows];
    __shared__ int32_t n_slots[max_regions];
    __shared__ Sight sight;
    if (static_cast<int>(threadIdx.x) < item.n_rows) {
        rows_at[threadIdx.x] = item.row_at(p, first_row + static_cast<int>(threadIdx.x));
    }
    if (static_cast<int>(threadIdx.x) < p.n_regions) n_slots[threadIdx.x] = p.n_slots[threadIdx.x];
    load_tables<KB, VB>(p, item, block_threads<Warp::fixed_threads>(), groups, chunks);
    if constexpr (Warp::rebuilds) keys.fill(p, p.by_plane, item.head_kv);
    __syncthreads();
    wait_for_previous();

    const DecodeShared all{shared, groups, chunks, queries, rows_at, n_slots, &sight};
    Warp warp{p, parts, item, all, own + plan.turned, keys, share};
    warp.choose_run();
    typename Warp::Rows rows;
    warp.see_rows(rows);
    warp.share_sight(rows);
    DecodeSums<VB> sums;
    warp.walk(rows, sums);
    warp.leave(sums);
}

template <int B, int MT, int Kind, KPath Path, bool Apart = false>
cudaError_t launch_one(const DecodeArgs& args, int items, cudaStream_t stream) {
    const int n_rows = (Apart ? 1 : args.n_tokens) * args.unit * (args.n_head / args.n_kv);
    const dim3 grid(static_cast<unsigned>(items), Apart ? apart_blocks(args) : static_cast<unsigned>(args.n_split),
                    static_cast<unsigned>((n_rows + decode_rows - 1) / decode_rows));
    return launch_next(decode_kernel<B, B, MT, Kind, Path, Apart>, grid, 32 * args.warps,
                       static_cast<size_t>(DecodeLayout(args).total(args)), stream, args);
}

template <int B, int Kind, KPath Path>
cudaError_t launch_tile(const DecodeArgs& args, int items, cudaStream_t stream) {
    if constexpr ((B > 2 && Path == KPath::rebuilt) || is_stock_kind(Kind)) {
        return launch_one<B, 1, Kind, Path>(args, items, stream);
    } else {
        return args.tile == 32 ? launch_one<B, 2, Kind, Path>(args, items, stream)
                               : launch_one<B, 1, Kind, Path>(args, items, stream);
    }
}

template <int B, KPath Path>
cudaError_t launch_kind(const DecodeArgs& args, int items, cudaStream_t stream) {
    return with_kind(args.kind, [&](auto kind) {
        constexpr int Kind = decltype(kind)::value;
        constexpr bool has_code = is_stock_kind(Kind) ? Path == KPath::stored : B <= 2 || Path == KPath::rebuilt;
        return launch_tile<B, has_code ? Kind : any_kind, Path>(args, items, stream);
    });
}

template <KPath Path>
cudaError_t launch_path(const DecodeArgs& args, int items, cudaStream_t stream) {
    const int blocks = args.k_blocks > args.v_blocks ? args.k_blocks : args.v_blocks;
    if (blocks > 2) return launch_kind<4, Path>(args, items, stream);
    return blocks == 2 ? launch_kind<2, Path>(args, items, stream) : launch_kind<1, Path>(args, items, stream);
}

}  // namespace lkv::cuda
