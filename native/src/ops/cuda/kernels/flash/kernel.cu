#include <type_traits>

#include "ops/cuda/kernels/flash/kernel.cuh"

namespace lkv::cuda {

cudaError_t launch_flash(const FlashArgs& args, int heads, cudaStream_t stream) {
    const int n_rows = args.n_tokens * (args.n_head / args.n_kv);
    const dim3 grid(static_cast<unsigned>(heads), static_cast<unsigned>((n_rows + flash_rows - 1) / flash_rows),
                    static_cast<unsigned>(args.n_split));
    const auto of = [&](auto in_tiles) {
        constexpr bool by_tiles = decltype(in_tiles)::value;
        return args.head_dim == 64    ? flash_kernel<64, by_tiles>
               : args.head_dim == 128 ? flash_kernel<128, by_tiles>
                                      : flash_kernel<most_flash_head, by_tiles>;
    };
    const auto kernel = args.in_tiles != 0 ? of(std::true_type{}) : of(std::false_type{});
    return launch_next(kernel, grid, n_threads, static_cast<size_t>(flash_shared(args.head_dim)), stream, args);
}

}  // namespace lkv::cuda
