// RoPE of one token's heads, as vectors are loaded.
#pragma once

#include "ops/cuda/step/angle.cuh"
#include "ops/cuda/step/turn.h"

namespace lkv::cuda {

// angles: cosine and sine of every plane, [n_rot / 2]. By all threads; a barrier follows.
__device__ inline void fill_angles(const RopeTurn& turn, float2* angles) {
    for (int i = threadIdx.x; i < turn.n_rot / 2; i += static_cast<int>(blockDim.x)) {
        const float2 of = angle_of(turn.phases[i], *turn.pos);
        angles[i] = make_float2(of.x * turn.mscale, of.y * turn.mscale);
    }
}

// Values i … i + 3 of vectors of whole heads, turned. angles: cosine and sine of every plane
__device__ inline float4 turned(const RopeTurn& turn, const float2* angles, const float* x, int i) {
    const float4 four = *reinterpret_cast<const float4*>(x + i);
    const int dim = i % turn.head_dim;
    if (turn.neox == 0) {
        float4 out = four;
        if (dim < turn.n_rot) {
            const float2 of = angles[dim / 2];
            out.x = four.x * of.x - four.y * of.y;
            out.y = four.y * of.x + four.x * of.y;
        }
        if (dim + 2 < turn.n_rot) {
            const float2 of = angles[dim / 2 + 1];
            out.z = four.z * of.x - four.w * of.y;
            out.w = four.w * of.x + four.z * of.y;
        }
        return out;
    }
    const int half = turn.n_rot / 2;
    const float in[4] = {four.x, four.y, four.z, four.w};
    float out[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int at = dim + e;
        out[e] = in[e];
        if (at >= turn.n_rot) continue;
        const bool second = at >= half;
        const float2 of = angles[second ? at - half : at];
        out[e] = second ? in[e] * of.x + x[i + e - half] * of.y : in[e] * of.x - x[i + e + half] * of.y;
    }
    return make_float4(out[0], out[1], out[2], out[3]);
}

}  // namespace lkv::cuda
