#include "ops/cuda/prefill/launch_prefill.cuh"

namespace lkv::cuda {

cudaError_t launch_prefill(const AttnArgs& args, cudaStream_t stream) { return launch_channels<false>(args, stream); }

}  // namespace lkv::cuda
