#include "ops/cuda/instances.h"
#include "ops/cuda/specialized/decode_specialized.cuh"

namespace lkv::cuda {

namespace {

template <int B, int Kind, bool Absorbs, bool Paired>
cudaError_t launch_as(const AttnArgs& args, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(launched_items(args)), static_cast<unsigned>(args.n_split));
    return launch_clusters(dim3(Paired ? 2 : 1), decode_specialized_kernel<B, Kind, Absorbs, Paired>, grid,
                           specialized_threads, static_cast<size_t>(SpecializedPlan(args).total(args)), stream, args);
}

template <int B, int Kind, bool Absorbs>
cudaError_t launch_one(const AttnArgs& args, cudaStream_t stream) {
    if ((args.stages & (args.stages - 1)) != 0 || args.stages < least_latent_buffers(B, args.unit, args.pair != 0)) {
        return cudaErrorInvalidValue;  // Turn counts in powers of two
    }
    if constexpr (B == 4 && Absorbs) {
        if (args.pair != 0) return launch_as<B, Kind, Absorbs, true>(args, stream);
    }
    return launch_as<B, Kind, Absorbs, false>(args, stream);
}

template <int B>
cudaError_t launch_kind(const AttnArgs& args, cudaStream_t stream) {
    return with_kind(args.kind, [&](auto kind) {
        constexpr int k = decltype(kind)::value;
        return args.absorbed_span != 0 ? launch_one<B, k, true>(args, stream) : launch_one<B, k, false>(args, stream);
    });
}

}  // namespace

cudaError_t launch_decode_specialized(const AttnArgs& args, cudaStream_t stream) {
    const int blocks = decode_blocks(args);
    if (blocks == 1) return launch_kind<1>(args, stream);
    return blocks == 2 ? launch_kind<2>(args, stream) : launch_kind<4>(args, stream);
}

bool has_specialized() {
    // the kernel has a body only in machine code for compute capability 9.0 itself
    return compiled<AttnArgs>(decode_specialized_kernel<4, any_kind, false, false>).sharedSizeBytes > 0;
}

}  // namespace lkv::cuda
