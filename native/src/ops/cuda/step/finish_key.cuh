// What makes a key of a product: bias, norm, RoPE.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/step/angle.cuh"

namespace lkv::cuda {

// Bias, norm and RoPE of one head's key. x: f16 [head_dim] in shared memory. By one warp
template <int most_dims>
__device__ inline void finish_key(const Problem& p, int head, int pos, __half* x, int lane) {
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
        of[k] = make_float2(__half2float(x[d.x]), __half2float(x[d.y]));
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
        x[d.x] = __float2half_rn(of[k].x);
        x[d.y] = __float2half_rn(of[k].y);
    }
}

}  // namespace lkv::cuda
