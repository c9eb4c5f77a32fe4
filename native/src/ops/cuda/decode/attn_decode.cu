#include "ops/cuda/decode/launch_decode.cuh"

namespace lkv::cuda {

cudaError_t launch_decode(const AttnArgs& args, cudaStream_t stream) {
    return launch_blocks<KPath::stored>(args, stream);
}

}  // namespace lkv::cuda
