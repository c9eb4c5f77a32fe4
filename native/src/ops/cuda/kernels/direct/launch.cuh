// Launching one instance of the attention kernel.
#pragma once

#include "ops/cuda/kernels/direct/kernel.cuh"

namespace lkv::cuda {

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
