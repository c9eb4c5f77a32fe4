// K in blocks of 32 tokens: 16 query rows a thread block, whatever the batch.
#include "ops/cuda/kernels/direct/kernel.cuh"

namespace lkv::cuda {

namespace {

template <bool REBUILD>
cudaError_t launch(const DirectArgs& args, cudaStream_t stream) {
    switch (args.blocks) {
        case 1:
            return launch_one<1, 1, REBUILD, true>(args, stream);
        case 2:
            return launch_one<1, 2, REBUILD, true>(args, stream);
        case 4:
            return launch_one<1, 4, REBUILD, true>(args, stream);
        default:
            return cudaErrorInvalidConfiguration;
    }
}

}  // namespace

cudaError_t launch_blocks(const DirectArgs& args, cudaStream_t stream) {
    return args.rebuild != 0 ? launch<true>(args, stream) : launch<false>(args, stream);
}

}  // namespace lkv::cuda
