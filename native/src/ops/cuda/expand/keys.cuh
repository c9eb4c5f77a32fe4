// What makes a key of a product: bias, norm, RoPE.
#pragma once

#include "ops/cuda/expand/latents.cuh"
#include "ops/cuda/step/angle.cuh"

namespace lkv::cuda {

// Bias, norm and RoPE of one head's key. x: f16 [head_dim] in shared memory. By one warp
__device__ inline void finish_key(const AttnArgs& p, const ExpandSide& side, int head, int pos, __half* x, int lane) {
    constexpr int most = most_expanded_head / 64;  // pairs of dimensions of a lane
    const int planes = side.n_rot / 2;
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
        if (side.bias != nullptr) {
            of[k].x += side.bias[head * p.head_dim + d.x];
            of[k].y += side.bias[head * p.head_dim + d.y];
        }
        power += of[k].x * of[k].x + of[k].y * of[k].y;
    }
    float inverse = 1.0f;
    if (side.norm != nullptr) {
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
        if (side.norm != nullptr) {
            of[k].x *= inverse * side.norm[d.x];
            of[k].y *= inverse * side.norm[d.y];
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

// RoPE of whole heads where a lane has both dimensions of its planes: neighbours, or APART blocks of eight dimensions from each other.
// pos: of slots g and g + 8 of both sixteens
template <int APART>
__device__ __forceinline__ void turn_keys(const AttnArgs& p, float (&acc)[2][64], const int (&pos)[2][2], int lane) {
#pragma unroll
    for (int n = 0; n < 16; n++) {
        if constexpr (APART != 0) {
            if (n / APART % 2 != 0) continue;
        }
#pragma unroll
        for (int e = 0; e < (APART == 0 ? 1 : 2); e++) {
            const int column = 8 * n + lane % 4 * 2 + e;
            const int d = column - small_quotient(column, p.head_dim) * p.head_dim;
            const uint64_t phase = p.phases[APART == 0 ? d / 2 : d];
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const auto [cosine, sine] = angle_of(phase, pos[m][i]);
                    float& x = acc[m][4 * n + 2 * i + e];
                    float& y = acc[m][4 * (n + APART) + 2 * i + (APART == 0 ? 1 : e)];
                    const float turned = (x * cosine - y * sine) * p.rope_mscale;
                    y = (x * sine + y * cosine) * p.rope_mscale;
                    x = turned;
                }
            }
        }
    }
}

// The same, if this shape's keys need no more than that. False: finish_key does it all.
__device__ __forceinline__ bool turn_whole_keys(const AttnArgs& p, const ExpandSide& side, float (&acc)[2][64],
                                                const int* positions, int lane) {
    if (side.n_rot != p.head_dim || side.bias != nullptr || side.norm != nullptr) return false;
    int pos[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) pos[i / 2][i % 2] = positions[lane / 4 + 8 * i];
    if (p.rope_neox == 0) {
        turn_keys<0>(p, acc, pos, lane);
    } else if (p.head_dim == 128) {
        turn_keys<8>(p, acc, pos, lane);
    } else if (p.head_dim == 64) {
        turn_keys<4>(p, acc, pos, lane);
    } else {
        return false;
    }
    return true;
}

}  // namespace lkv::cuda
