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
cudaError_t launch_rows(const MlaArgs& args, int items, cudaStream_t stream) {
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
            return launch_rows<1>(args, items, stream);
        case 16:
            return launch_rows<2>(args, items, stream);
        default:
            return launch_rows<4>(args, items, stream);
    }
}

}  // namespace lkv::cuda
