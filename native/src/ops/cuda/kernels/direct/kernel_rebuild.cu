#include "ops/cuda/kernels/direct/kernel.cuh"

namespace lkv::cuda {

cudaError_t launch_rebuild(const DirectArgs& args, cudaStream_t stream) { return launch_instance<true>(args, stream); }

}  // namespace lkv::cuda
