// One channel of the segment that begins `offset` bytes into a row, whatever its format.
#pragma once

#include "cache/formats.h"

namespace lkv::cuda {

template <class F>
__device__ inline float value_of(const uint8_t* row, int offset, int i) {
    const float code = F::code(row + offset, i);
    if constexpr (!F::quantized) return code;
    constexpr int block = F::block > 0 ? F::block : 1 << 30;
    const Affine a = affine_of<F>(row, offset, i / block);
    return fmaf(code, a.scale, a.offset);
}

}  // namespace lkv::cuda
