#include "ops/cuda/kernels/wide/kernel.cuh"
#include "ops/cuda/rows/dequant.cuh"

namespace lkv::cuda {

namespace {

template <int NT, int NB, int Kind>
cudaError_t launch_one(const WideArgs& args, int items, cudaStream_t stream) {
    constexpr int rows = 8 * NT;
    const auto kernel = wide_kernel<NT, NB, Kind>;
    const int n_rows = args.n_tokens * args.unit * (args.n_head / args.n_kv);
    const int row_blocks = (n_rows + rows - 1) / rows;
    const dim3 grid(static_cast<unsigned>(items), static_cast<unsigned>(row_blocks),
                    static_cast<unsigned>(args.n_split));
    const WideLayout plan(args, rows);
    return launch_next(kernel, grid, n_wide_threads, static_cast<size_t>(plan.total), stream, args, plan);
}

template <int Kind>
cudaError_t launch_kind(const WideArgs& args, int items, cudaStream_t stream) {
    if (args.v_blocks > n_wide_warps) return launch_one<2, 2, Kind>(args, items, stream);
    return args.rows == 16 ? launch_one<2, 1, Kind>(args, items, stream) : launch_one<4, 1, Kind>(args, items, stream);
}

}  // namespace

cudaError_t launch_wide(const Plan& plan, cudaStream_t stream) {
    const WideArgs args{plan, plan.as<WidePlan>()};
    return with_kind(args.kind,
                     [&](auto kind) { return launch_kind<decltype(kind)::value>(args, plan.items, stream); });
}

}  // namespace lkv::cuda
