#include "ops/cuda/instances.h"
#include "ops/cuda/launch_decode.cuh"

namespace lkv::cuda {

cudaError_t launch_decode_fours(const AttnArgs& args, cudaStream_t stream) {
    if (decode_blocks(args) == 4) return launch_kind<4, KPath::rebuilt_in_fours>(args, stream);
    return launch_kind<2, KPath::rebuilt_in_fours>(args, stream);
}

bool multiplies_in_fours() {
    // the kernel has a body only in machine code for compute capability 9.0 itself
    return compiled<AttnArgs>(decode_kernel<4, 4, 1, any_kind, KPath::rebuilt_in_fours>).sharedSizeBytes > 0;
}

}  // namespace lkv::cuda
