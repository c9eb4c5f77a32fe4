#include "ops/cuda/kernels/decode/kernel.cuh"

namespace lkv::cuda {

cudaError_t launch_decode(const DecodeArgs& args, int items, cudaStream_t stream) {
    return launch_path<KPath::stored>(args, items, stream);
}

}  // namespace lkv::cuda
