#include "ops/cuda/kernels/prefill/kernel.cuh"

namespace lkv::cuda {

namespace {

template <int WC, int KQ, int NV>
cudaError_t launch_one(const PrefillArgs& args, cudaStream_t stream) {
    constexpr int rows = 128 / WC;
    const int n_rows = args.n_tokens * args.unit * (args.n_head / args.n_kv);
    const dim3 grid(static_cast<unsigned>(args.n_kv / args.unit), static_cast<unsigned>((n_rows + rows - 1) / rows),
                    static_cast<unsigned>(args.n_split));
    return launch_next(prefill_kernel<WC, KQ, NV, prefill_tile(WC)>, grid, prefill_threads(WC),
                       static_cast<size_t>(PrefillLayout(args).total(args)), stream, args);
}

}  // namespace

cudaError_t launch_prefill(const PrefillArgs& args, cudaStream_t stream) {
    if (args.wc == 8) return launch_one<8, 0, 8>(args, stream);
    if (args.wc == 4) return launch_one<4, 0, 16>(args, stream);
    if (args.wc == 2) return launch_one<2, 0, 16>(args, stream);
    return PrefillLayout::prefill_depth(PrefillLayout(args).k16, args.v_blocks) == 4
               ? launch_one<1, 4, 4>(args, stream)
               : launch_one<1, 8, 8>(args, stream);
}

}  // namespace lkv::cuda
