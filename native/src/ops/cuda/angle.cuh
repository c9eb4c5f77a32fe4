// The angle of a RoPE plane at a position.
#pragma once

#include "ops/cuda/args.h"

namespace lkv::cuda {

// Cosine and sine of `position` in plane i.
__device__ inline float2 angle_of(const AttnArgs& p, int i, int position) {
    // turns as a 64-bit fraction: whole turns fall off the top, so the angle is exact at any position
    const auto turns = static_cast<uint64_t>(position) * p.phases[i];
    float2 of;
    __sincosf(static_cast<float>(static_cast<int32_t>(turns >> 32)) * 1.46291808e-9f, &of.y, &of.x);  // π / 2^31
    return of;
}

}  // namespace lkv::cuda
