#include "ops/cuda/instances.h"
#include "ops/cuda/launch_attn.cuh"

namespace lkv::cuda {

cudaError_t launch_rebuild(const AttnArgs& args, const Instance& instance, cudaStream_t stream) {
    return launch_instance<true>(args, instance, stream);
}

}  // namespace lkv::cuda
