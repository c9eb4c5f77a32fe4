// One channel of a segment, whatever its format.
#pragma once

#include "cache/formats.h"

namespace lkv::cuda {

template <class F>
__device__ inline float value_of(const uint8_t* src, int i) {
    const float code = F::code(src, i);
    if constexpr (!F::quantized) return code;
    constexpr int block = F::block > 0 ? F::block : 1 << 30;
    const Affine a = F::affine(src, i / block);
    return fmaf(code, a.scale, a.offset);
}

}  // namespace lkv::cuda
