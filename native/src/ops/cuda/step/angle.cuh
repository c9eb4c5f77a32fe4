// The angle of a RoPE plane at a position.
#pragma once

#include "ops/cuda/problem.h"

namespace lkv::cuda {

// Cosine and sine of `position` in a plane of that phase.
__device__ inline float2 angle_of(uint64_t phase, int position) {
    // turns as a 64-bit fraction: whole turns fall off the top, so the angle is exact at any position
    const auto turns = static_cast<uint64_t>(position) * phase;
    float2 of;
    __sincosf(static_cast<float>(static_cast<int32_t>(turns >> 32)) * 1.46291808e-9f, &of.y, &of.x);  // π / 2^31
    return of;
}

// The same in plane i.
__device__ inline float2 angle_of(const Problem& p, int i, int position) { return angle_of(p.phases[i], position); }

}  // namespace lkv::cuda
