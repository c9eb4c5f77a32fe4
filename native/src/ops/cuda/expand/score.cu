#include <algorithm>

#include "ops/cuda/expand/score.cuh"
#include "ops/cuda/instances.h"
#include "ops/cuda/launch.h"

namespace lkv::cuda {

// Whole heads that need RoPE in all dimensions or none, and no bias or norm.
bool plan_scores(const Device& device, AttnArgs& a) {
    constexpr int fixed = 4096;  // bytes of the kernel's own variables, at most
    const ExpandSide side(a, true);
    a.score_blocks = std::max(1, device.n_multiprocessors / (a.n_kv / side.heads));
    return device.specialized && side.heads * a.head_dim == expand_columns && a.k_extras == 0 &&
           (a.n_rot == 0 || a.n_rot == a.head_dim) && a.n_tokens * (a.n_head / a.n_kv) <= 32 &&
           ScoreLayout(a).total() <= device.shared_bytes - fixed;
}

cudaError_t launch_scores(const AttnArgs& args, const ScoreTo& to, cudaStream_t stream) {
    const ExpandSide side(args, true);
    const dim3 grid(static_cast<unsigned>(args.score_blocks), static_cast<unsigned>(args.n_kv / side.heads));
    const auto shared = static_cast<size_t>(ScoreLayout(args).total());
    const int rows = score_rows(args);
    const auto kernel = rows == 8 ? score_kernel<1> : (rows == 16 ? score_kernel<2> : score_kernel<4>);
    return launch_next(kernel, grid, score_threads, shared, stream, args, side, to);
}

}  // namespace lkv::cuda
