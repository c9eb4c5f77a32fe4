// RoPE: the angle of a plane at a position, one token's heads as vectors are loaded, and what makes a key of a product.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/problem.h"
#include "ops/cuda/rows/rows.cuh"
#include "ops/cuda/step/turn.h"

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

// Bias, norm and RoPE of one head's key. x: [head_dim] in f16 or f32; to: likewise, x itself or another. By one warp
template <int most_dims, class From, class To>
__device__ inline void finish_key(const Problem& p, int head, int pos, const From* x, To* to, int lane) {
    constexpr int most = most_dims / 64;  // pairs of dimensions of a lane
    const int planes = p.n_rot / 2;
    float2 of[most];
    float power = 0.0f;
    struct Dims {
        int x, y;
    };
    const auto dims = [&](int i) {  // of pair i: a plane's, or neighbours behind them
        return i < planes && p.rope_neox != 0 ? Dims{i, i + planes} : Dims{2 * i, 2 * i + 1};
    };
#pragma unroll
    for (int k = 0; k < most; k++) {
        const int i = lane + 32 * k;
        of[k] = make_float2(0.0f, 0.0f);
        if (2 * i >= p.head_dim) continue;
        const Dims d = dims(i);
        of[k] = make_float2(as_float(x[d.x]), as_float(x[d.y]));
        if (p.k_bias != nullptr) {
            of[k].x += p.k_bias[head * p.head_dim + d.x];
            of[k].y += p.k_bias[head * p.head_dim + d.y];
        }
        power += of[k].x * of[k].x + of[k].y * of[k].y;
    }
    float inverse = 1.0f;
    if (p.k_norm != nullptr) {
#pragma unroll
        for (int o = 16; o > 0; o /= 2) power += __shfl_xor_sync(0xffffffffu, power, o);
        inverse = rsqrtf(power / static_cast<float>(p.head_dim) + p.k_norm_eps);
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < most; k++) {
        const int i = lane + 32 * k;
        if (2 * i >= p.head_dim) continue;
        const Dims d = dims(i);
        if (p.k_norm != nullptr) {
            of[k].x *= inverse * p.k_norm[d.x];
            of[k].y *= inverse * p.k_norm[d.y];
        }
        if (i < planes) {
            const auto [cosine, sine] = angle_of(p, i, pos);
            of[k] = make_float2((of[k].x * cosine - of[k].y * sine) * p.rope_mscale,
                                (of[k].x * sine + of[k].y * cosine) * p.rope_mscale);
        }
        put_value(to + d.x, of[k].x);
        put_value(to + d.y, of[k].y);
    }
}

}  // namespace lkv::cuda
