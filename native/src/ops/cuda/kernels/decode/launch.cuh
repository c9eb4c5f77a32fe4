// Launching one instance of the decode kernel.
#pragma once

#include "ops/cuda/kernels/decode/kernel.cuh"
#include "ops/cuda/rows/kinds.h"

namespace lkv::cuda {

template <int B, int MT, int Kind, KPath Path>
cudaError_t launch_one(const DecodeArgs& args, int items, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(items), static_cast<unsigned>(args.n_split));
    return launch_next(decode_kernel<B, B, MT, Kind, Path>, grid, 32 * args.warps,
                       static_cast<size_t>(DecodeLayout(args).total(args)), stream, args);
}

template <int B, int Kind, KPath Path>
cudaError_t launch_tile(const DecodeArgs& args, int items, cudaStream_t stream) {
    if constexpr (B > 2 && Path == KPath::rebuilt) {
        return launch_one<B, 1, Kind, Path>(args, items, stream);
    } else {
        return args.tile == 32 ? launch_one<B, 2, Kind, Path>(args, items, stream)
                               : launch_one<B, 1, Kind, Path>(args, items, stream);
    }
}

template <int B, KPath Path>
cudaError_t launch_kind(const DecodeArgs& args, int items, cudaStream_t stream) {
    return with_kind(args.kind,
                     [&](auto kind) { return launch_tile<B, decltype(kind)::value, Path>(args, items, stream); });
}

template <KPath Path>
cudaError_t launch_path(const DecodeArgs& args, int items, cudaStream_t stream) {
    const int blocks = args.k_blocks > args.v_blocks ? args.k_blocks : args.v_blocks;
    if constexpr (Path == KPath::rebuilt) {
        if (blocks > 2) return launch_kind<4, Path>(args, items, stream);
    } else {
        if (blocks > 2) return launch_tile<4, any_kind, Path>(args, items, stream);
    }
    return blocks == 2 ? launch_kind<2, Path>(args, items, stream) : launch_kind<1, Path>(args, items, stream);
}

}  // namespace lkv::cuda
