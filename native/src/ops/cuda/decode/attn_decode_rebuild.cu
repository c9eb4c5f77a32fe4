#include "ops/cuda/decode/launch_decode.cuh"

namespace lkv::cuda {

cudaError_t launch_decode_rebuild(const AttnArgs& args, cudaStream_t stream) {
    return launch_blocks<KPath::rebuilt>(args, stream);
}

}  // namespace lkv::cuda
