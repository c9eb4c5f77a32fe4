// K in blocks of 32 tokens: 16 query rows a thread block, whatever the batch.
#include "ops/cuda/direct/launch_attn.cuh"
#include "ops/cuda/instances.h"

namespace lkv::cuda {

namespace {

template <bool REBUILD>
cudaError_t launch(const AttnArgs& args, int blocks, cudaStream_t stream) {
    switch (blocks) {
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

cudaError_t launch_blocks(const AttnArgs& args, const Instance& instance, cudaStream_t stream) {
    return args.rebuild != 0 ? launch<true>(args, instance.blocks, stream)
                             : launch<false>(args, instance.blocks, stream);
}

}  // namespace lkv::cuda
