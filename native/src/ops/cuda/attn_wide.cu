#include "ops/cuda/instances.h"
#include "ops/cuda/wide.cuh"

namespace lkv::cuda {

namespace {

template <int NT, int NB, int Kind>
cudaError_t launch_one(const AttnArgs& args, cudaStream_t stream) {
    constexpr int rows = 8 * NT;
    const int n_rows = args.n_tokens * args.unit * (args.n_head / args.n_kv);
    const dim3 grid(static_cast<unsigned>(args.n_kv / args.unit), static_cast<unsigned>((n_rows + rows - 1) / rows),
                    static_cast<unsigned>(args.n_split));
    return launch_next(wide_kernel<NT, NB, Kind>, grid, n_threads, static_cast<size_t>(WidePlan::total(args, rows)),
                       stream, args);
}

template <int Kind>
cudaError_t launch_kind(const AttnArgs& args, cudaStream_t stream) {
    const int per_warp = (args.v_blocks + n_warps - 1) / n_warps;
    if (per_warp > 2) return launch_one<2, 4, Kind>(args, stream);
    if (args.wide == 16) {
        return per_warp > 1 ? launch_one<2, 2, Kind>(args, stream) : launch_one<2, 1, Kind>(args, stream);
    }
    return per_warp > 1 ? launch_one<4, 2, Kind>(args, stream) : launch_one<4, 1, Kind>(args, stream);
}

}  // namespace

cudaError_t launch_wide(const AttnArgs& args, cudaStream_t stream) {
    switch (args.kind) {
        case kind_f16_wide:
            return launch_kind<kind_f16_wide>(args, stream);
        case static_cast<int>(Format::q4):
            return launch_kind<static_cast<int>(Format::q4)>(args, stream);
        default:
            return launch_kind<any_kind>(args, stream);
    }
}

}  // namespace lkv::cuda
