#include "ops/cuda/direct/launch_attn.cuh"
#include "ops/cuda/instances.h"

namespace lkv::cuda {

cudaError_t launch_rebuild(const AttnArgs& args, const Instance& instance, cudaStream_t stream) {
    return launch_instance<true>(args, instance, stream);
}

}  // namespace lkv::cuda
