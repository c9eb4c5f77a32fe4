#include "ops/cuda/softmax/merge.cuh"

#include "ops/cuda/softmax/merge.h"

namespace lkv::cuda {

cudaError_t merge_parts(const CutProblem& parts, const CutProblem* full, cudaStream_t stream) {
    if (parts.v_b == nullptr) {
        return launch_merge<LeftSums, 1, Product::none>(parts, full, static_cast<unsigned>(parts.head_dim + 63) / 64,
                                                        stream);
    }
    if (parts.n_tokens <= most_counted_tokens) return merge_few<LeftSums>(parts, full, stream);
    return launch_merge<LeftSums, 2, Product::whole>(parts, full, 1, stream);
}

size_t parts_floats(const CutProblem& a) {
    const size_t rows =
        static_cast<size_t>(a.n_tokens) * static_cast<size_t>(a.n_head) * static_cast<size_t>(a.v_blocks);
    const int shared = a.n_tokens <= most_counted_tokens ? a.head_dim : 0;
    return rows * (static_cast<size_t>(a.n_split) * 64 + static_cast<size_t>(shared));
}

}  // namespace lkv::cuda
