// A format that all chunks of a launch have, as a constant of the code that decodes them.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "cache/formats.h"
#include "ops/cuda/problem.h"

namespace lkv::cuda {

// Launches by what all chunks are: launch(kind) gets it as a constant.
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

}  // namespace lkv::cuda
