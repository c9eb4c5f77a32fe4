#include "ops/cuda/prefill/launch_prefill.cuh"

namespace lkv::cuda {

cudaError_t launch_prefill_rebuild(const AttnArgs& args, cudaStream_t stream) {
    return launch_channels<true>(args, stream);
}

}  // namespace lkv::cuda
