#include "ops/cuda/kernels/decode/kernel.cuh"

namespace lkv::cuda {

cudaError_t launch_decode_blocks(const DecodeArgs& args, int items, cudaStream_t stream) {
    switch (decode_blocks(args)) {
        case 1:
            return launch_one<1, 2, any_kind, KPath::blocks>(args, items, stream);
        case 2:
            return launch_one<2, 2, any_kind, KPath::blocks>(args, items, stream);
        default:
            return launch_one<4, 2, any_kind, KPath::blocks>(args, items, stream);
    }
}

}  // namespace lkv::cuda
