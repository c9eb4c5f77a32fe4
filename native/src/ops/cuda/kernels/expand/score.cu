#include <algorithm>

#include "ops/cuda/kernels/expand/score.cuh"

namespace lkv::cuda {

// Whole heads that need RoPE in all dimensions or none, and no bias or norm.
int plan_scores(const Device& device, const Problem& a) {
    const ExpandSide side(a, true);
    const bool taken = device.warpgroups && side.heads * a.head_dim == expand_columns && a.k_extras == 0 &&
                       (a.n_rot == 0 || a.n_rot == a.head_dim) && a.n_tokens * (a.n_head / a.n_kv) <= 32 &&
                       ScoreLayout(a).total() <= device.shared_bytes - resident_own_bytes;
    return taken ? std::max(1, device.n_multiprocessors / (a.n_kv / side.heads)) : 0;
}

cudaError_t launch_scores(const CutProblem& args, int blocks, const ScoreTo& to, cudaStream_t stream) {
    const ExpandSide side(args, true);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(args.n_kv / side.heads));
    const auto shared = static_cast<size_t>(ScoreLayout(args).total());
    const int rows = score_rows(args);
    const auto kernel = rows == 8 ? score_kernel<1> : (rows == 16 ? score_kernel<2> : score_kernel<4>);
    return launch_next(kernel, grid, resident_threads, shared, stream, args, side, to);
}

}  // namespace lkv::cuda
