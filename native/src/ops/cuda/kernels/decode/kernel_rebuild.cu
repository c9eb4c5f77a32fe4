#include "ops/cuda/kernels/decode/kernel.cuh"

namespace lkv::cuda {

cudaError_t launch_decode_rebuild(const DecodeArgs& args, int items, cudaStream_t stream) {
    return launch_path<KPath::rebuilt>(args, items, stream);
}

}  // namespace lkv::cuda
