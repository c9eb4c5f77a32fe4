// Launching one instance of the decode kernel.
#pragma once

#include "ops/cuda/decode.cuh"
#include "ops/cuda/instances.h"

namespace lkv::cuda {

template <int B, int MT, int Kind, bool REBUILD>
cudaError_t launch_one(const AttnArgs& args, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(args.n_kv / args.unit), static_cast<unsigned>(args.n_split));
    return launch_next(decode_kernel<B, B, MT, Kind, REBUILD>, grid, 32 * args.decode,
                       static_cast<size_t>(DecodePlan(args).total(args)), stream, args);
}

template <int B, int Kind, bool REBUILD>
cudaError_t launch_tile(const AttnArgs& args, cudaStream_t stream) {
    if constexpr (B > 2 && REBUILD) return launch_one<B, 1, Kind, REBUILD>(args, stream);
    return args.tile == 32 ? launch_one<B, 2, Kind, REBUILD>(args, stream)
                           : launch_one<B, 1, Kind, REBUILD>(args, stream);
}

template <int B, bool REBUILD>
cudaError_t launch_kind(const AttnArgs& args, cudaStream_t stream) {
    switch (args.kind) {
        case kind_f16_wide:
            return launch_tile<B, kind_f16_wide, REBUILD>(args, stream);
        case static_cast<int>(Format::q8):
            return launch_tile<B, static_cast<int>(Format::q8), REBUILD>(args, stream);
        case static_cast<int>(Format::q4):
            return launch_tile<B, static_cast<int>(Format::q4), REBUILD>(args, stream);
        default:
            return launch_tile<B, any_kind, REBUILD>(args, stream);
    }
}

template <bool REBUILD>
cudaError_t launch_blocks(const AttnArgs& args, cudaStream_t stream) {
    const int blocks = args.k_blocks > args.v_blocks ? args.k_blocks : args.v_blocks;
    if constexpr (REBUILD) {
        if (blocks > 2) return launch_kind<4, true>(args, stream);
    } else {
        if (blocks > 2) return launch_tile<4, any_kind, false>(args, stream);
    }
    return blocks == 2 ? launch_kind<2, REBUILD>(args, stream) : launch_kind<1, REBUILD>(args, stream);
}

}  // namespace lkv::cuda
