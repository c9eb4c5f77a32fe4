// Tokens of several sequences, which each read their own slots.
#include "ops/cuda/kernels/decode/kernel.cuh"

namespace lkv::cuda {

namespace {

template <int B>
cudaError_t launch_blocks(const DecodeArgs& args, int items, cudaStream_t stream) {
    constexpr KPath stored = KPath::stored;
    constexpr int q8_0 = static_cast<int>(Format::q8_0);
    constexpr int q4_0 = static_cast<int>(Format::q4_0);
    if (args.in_blocks != 0) return launch_one<B, 2, any_kind, KPath::blocks, true>(args, items, stream);
    if (args.kind == q8_0) return launch_one<B, 1, q8_0, stored, true>(args, items, stream);
    if (args.kind == q4_0) return launch_one<B, 1, q4_0, stored, true>(args, items, stream);
    if constexpr (B <= 2) {
        if (args.kind == kind_f16_wide) {
            return args.tile == 32 ? launch_one<B, 2, kind_f16_wide, stored, true>(args, items, stream)
                                   : launch_one<B, 1, kind_f16_wide, stored, true>(args, items, stream);
        }
    }
    return args.tile == 32 ? launch_one<B, 2, any_kind, stored, true>(args, items, stream)
                           : launch_one<B, 1, any_kind, stored, true>(args, items, stream);
}

}  // namespace

cudaError_t launch_decode_apart(const DecodeArgs& args, int items, cudaStream_t stream) {
    switch (decode_blocks(args)) {
        case 1:
            return launch_blocks<1>(args, items, stream);
        case 2:
            return launch_blocks<2>(args, items, stream);
        default:
            return launch_blocks<4>(args, items, stream);
    }
}

}  // namespace lkv::cuda
