#include "ops/cuda/kernels/direct/kernel.cuh"

namespace lkv::cuda {

cudaError_t launch_direct(const DirectArgs& args, cudaStream_t stream) { return launch_instance<false>(args, stream); }

}  // namespace lkv::cuda
