#include "ops/cuda/kernels/flash/kernel.cuh"

namespace lkv::cuda {

cudaError_t launch_flash(const FlashArgs& args, cudaStream_t stream) {
    const int n_rows = args.n_tokens * (args.n_head / args.n_kv);
    const dim3 grid(static_cast<unsigned>(args.n_kv), static_cast<unsigned>((n_rows + flash_rows - 1) / flash_rows),
                    static_cast<unsigned>(args.n_split));
    const auto kernel = args.head_dim == 128 ? flash_kernel<128> : flash_kernel<64>;
    return launch_next(kernel, grid, n_threads, static_cast<size_t>(flash_shared(args.head_dim)), stream, args);
}

}  // namespace lkv::cuda
