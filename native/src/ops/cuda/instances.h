// The attention kernel's instances; one translation unit per K path and one for blocks, so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "cache/formats.h"
#include "ops/cuda/args.h"

namespace lkv::cuda {

// Query rows of a thread block (16, 32 or 64) and 64-channel blocks per warp (1, 2 or 4): what fits in registers.
struct Instance {
    int rows;
    int blocks;
};

constexpr Instance instances[] = {{16, 1}, {32, 1}, {64, 1}, {16, 2}, {32, 2}, {16, 4}};

// Launches by AttnArgs::kind: launch(kind) gets it as a constant.
template <class Launch>
cudaError_t with_kind(int kind, Launch&& launch) {
    switch (kind) {
        case kind_f16_wide:
            return launch(std::integral_constant<int, kind_f16_wide>{});
        case static_cast<int>(Format::q8):
            return launch(std::integral_constant<int, static_cast<int>(Format::q8)>{});
        case static_cast<int>(Format::q4):
            return launch(std::integral_constant<int, static_cast<int>(Format::q4)>{});
        default:
            return launch(std::integral_constant<int, any_kind>{});
    }
}

cudaError_t launch_decode(const AttnArgs& args, cudaStream_t stream);
cudaError_t launch_decode_rebuild(const AttnArgs& args, cudaStream_t stream);
cudaError_t launch_decode_specialized(const AttnArgs& args, cudaStream_t stream);
cudaError_t launch_mla(const AttnArgs& args, cudaStream_t stream);
// full: a problem whose parts are merged with them, or null; below too
cudaError_t merge_mla(const AttnArgs& args, const AttnArgs* full, cudaStream_t stream);
cudaError_t launch_wide(const AttnArgs& args, cudaStream_t stream);
cudaError_t launch_prefill(const AttnArgs& args, cudaStream_t stream);
// Whole attention as AttnArgs::expand plans it.
cudaError_t attend_expanded(const AttnArgs& args, const AttnArgs* full, cudaStream_t stream);
// The same of K alone, without what merges the parts; and the args that do that.
cudaError_t launch_expanded_keys(const AttnArgs& args, cudaStream_t stream);
AttnArgs all_expanded_keys(const AttnArgs& args);
cudaError_t launch_direct(const AttnArgs& args, const Instance& instance, cudaStream_t stream);
cudaError_t launch_rebuild(const AttnArgs& args, const Instance& instance, cudaStream_t stream);
cudaError_t launch_blocks(const AttnArgs& args, const Instance& instance, cudaStream_t stream);

// Whether this device and this build have what AttnArgs::specialized asks for.
bool has_specialized();

}  // namespace lkv::cuda
