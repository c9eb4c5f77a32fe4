// How the kernel is launched. Each number of query rows has a file that includes this: the assembler takes a minute for it.
#pragma once

#include "ops/cuda/kernels/mla/kernel.cuh"

namespace lkv::cuda {

template <int NT, int U, MlaK K, bool Apart = false>
cudaError_t launch_one(const MlaArgs& args, int items, cudaStream_t stream) {
    const int n_rows = (Apart ? 1 : args.n_tokens) * args.unit * (args.n_head / args.n_kv);
    const unsigned parts = Apart ? apart_blocks(args) : static_cast<unsigned>(args.n_split);
    const dim3 grid(static_cast<unsigned>(items), static_cast<unsigned>((n_rows + 8 * NT - 1) / (8 * NT)), parts);
    const MlaLayout layout(args.mla, args.n_regions);
    return launch_next(mla_kernel<NT, U, K, Apart>, grid, mla_threads, static_cast<size_t>(layout.total()), stream,
                       args, layout);
}

template <int NT, MlaK K>
cudaError_t launch_units(const MlaArgs& args, int items, cudaStream_t stream) {
    if constexpr (K == MlaK::values) {
        return args.apart != 0 ? launch_one<NT, 1, K, true>(args, items, stream)
                               : launch_one<NT, 1, K>(args, items, stream);
    }
    if constexpr (K == MlaK::latents) {
        if (args.apart != 0) {
            return 2 * args.v_blocks > mla_warps ? launch_one<NT, 2, K, true>(args, items, stream)
                                                 : launch_one<NT, 1, K, true>(args, items, stream);
        }
    }
    return 2 * args.v_blocks > mla_warps ? launch_one<NT, 2, K>(args, items, stream)
                                         : launch_one<NT, 1, K>(args, items, stream);
}

template <int NT>
cudaError_t launch_mla_rows(const MlaArgs& args, int items, cudaStream_t stream) {
    switch (args.mla.keys.as) {
        case MlaK::latents:
            return launch_units<NT, MlaK::latents>(args, items, stream);
        case MlaK::rows:
            return launch_units<NT, MlaK::rows>(args, items, stream);
        case MlaK::values:
            return launch_units<NT, MlaK::values>(args, items, stream);
        default:
            return launch_units<NT, MlaK::scores>(args, items, stream);
    }
}

}  // namespace lkv::cuda
