#include "ops/cuda/kernels/mla/kernel.cuh"
#include "ops/cuda/softmax/merge.cuh"

namespace lkv::cuda {

namespace {

// Means in f16, of the MLA kernel's own parts.
struct LeftMeans {
    using Args = MlaArgs;
    static constexpr bool means = true;
    MlaSlots counts;

    __device__ explicit LeftMeans(const Args& p) : counts(p) {}
    __device__ int parts_of(const Args& p, int token) const {
        return p.apart != 0 ? ApartShares(p).parts_of(p, token) : MlaSteps(p, counts).count;
    }
};

}  // namespace

cudaError_t merge_mla(const MlaArgs& args, const CutProblem* full, cudaStream_t stream) {
    if (args.v_b != nullptr && args.n_tokens <= most_counted_tokens) return merge_few<LeftMeans>(args, full, stream);
    if (args.v_b != nullptr) return launch_merge<LeftMeans, 2, Product::whole>(args, full, 1, stream);
    const auto blocks = static_cast<unsigned>((args.head_dim + 63) / 64);
    return launch_merge<LeftMeans, 1, Product::none>(args, full, blocks, stream);
}

cudaError_t launch_mla(const MlaArgs& args, int items, cudaStream_t stream) {
    switch (args.mla.rows) {
        case 8:
            return launch_mla_rows<1>(args, items, stream);
        case 16:
            return launch_mla_rows<2>(args, items, stream);
        default:
            return launch_mla_rows<4>(args, items, stream);
    }
}

}  // namespace lkv::cuda
