#include "ops/cuda/kernels/specialized/kernel.cuh"
#include "ops/cuda/rows/kinds.h"

namespace lkv::cuda {

namespace {

template <int B, int Kind, bool Absorbs, bool Paired>
cudaError_t launch_as(const SpecializedArgs& args, int items, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(items), static_cast<unsigned>(args.n_split));
    return launch_clusters(dim3(Paired ? 2 : 1), decode_specialized_kernel<B, Kind, Absorbs, Paired>, grid,
                           specialized_threads, static_cast<size_t>(SpecializedLayout(args).total(args)), stream, args);
}

template <int B, int Kind, bool Absorbs>
cudaError_t launch_one(const SpecializedArgs& args, int items, cudaStream_t stream) {
    if ((args.stages & (args.stages - 1)) != 0 || args.stages < least_latent_buffers(B, args.unit, args.pair != 0)) {
        return cudaErrorInvalidValue;  // Turn counts in powers of two
    }
    if constexpr (B == 4 && Absorbs) {
        if (args.pair != 0) return launch_as<B, Kind, Absorbs, true>(args, items, stream);
    }
    return launch_as<B, Kind, Absorbs, false>(args, items, stream);
}

template <int B>
cudaError_t launch_kind(const SpecializedArgs& args, int items, cudaStream_t stream) {
    return with_kind(args.kind, [&](auto kind) {
        constexpr int k = decltype(kind)::value;
        return args.absorbed_span != 0 ? launch_one<B, k, true>(args, items, stream)
                                       : launch_one<B, k, false>(args, items, stream);
    });
}

}  // namespace

cudaError_t launch_specialized(const Plan& plan, cudaStream_t stream) {
    const int blocks = decode_blocks(plan);
    const PackedWords at(plan.n_kv, plan.head_dim, plan.n_rot, blocks);
    const SpecializedArgs args{plan, plan.as<SpecializedPlan>(), plan.packed,
                               reinterpret_cast<const uint16_t*>(plan.packed + at.angles),
                               reinterpret_cast<const uint16_t*>(plan.packed + at.rebuilt_angles)};
    if (blocks == 1) return launch_kind<1>(args, plan.items, stream);
    return blocks == 2 ? launch_kind<2>(args, plan.items, stream) : launch_kind<4>(args, plan.items, stream);
}

}  // namespace lkv::cuda
