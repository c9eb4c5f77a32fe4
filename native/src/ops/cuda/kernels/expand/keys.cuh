// RoPE of expanded keys in registers.
#pragma once

#include "ops/cuda/kernels/expand/latents.cuh"
#include "ops/cuda/step/rope.cuh"

namespace lkv::cuda {

// RoPE of whole heads where a lane has both dimensions of its planes: neighbours, or APART blocks of eight dimensions from each other.
// acc: of slots g and g + 8 as mma has them; angles(plane, of): cosine and sine of both
template <int APART, class Angles>
__device__ __forceinline__ void turn_planes(const Problem& p, float (&acc)[64], int lane, const Angles& angles) {
#pragma unroll
    for (int n = 0; n < 16; n++) {
        if constexpr (APART != 0) {
            if (n / APART % 2 != 0) continue;
        }
#pragma unroll
        for (int e = 0; e < (APART == 0 ? 1 : 2); e++) {
            const int column = 8 * n + lane % 4 * 2 + e;
            const int d = column - small_quotient(column, p.head_dim) * p.head_dim;
            float2 of[2];
            angles(APART == 0 ? d / 2 : d, of);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& x = acc[4 * n + 2 * i + e];
                float& y = acc[4 * (n + APART) + 2 * i + (APART == 0 ? 1 : e)];
                const float turned = (x * of[i].x - y * of[i].y) * p.rope_mscale;
                y = (x * of[i].y + y * of[i].x) * p.rope_mscale;
                x = turned;
            }
        }
    }
}

template <class Angles>
__device__ __forceinline__ void turn_keys(const Problem& p, float (&acc)[64], int lane, const Angles& angles) {
    if (p.n_rot == 0) return;
    if (p.rope_neox == 0) {
        turn_planes<0>(p, acc, lane, angles);
    } else if (p.head_dim == 128) {
        turn_planes<8>(p, acc, lane, angles);
    } else {
        turn_planes<4>(p, acc, lane, angles);
    }
}

// The same of 32 slots, if this shape's keys need no more than that. False: finish_key does it all.
__device__ __forceinline__ bool turn_whole_keys(const Problem& p, const ExpandSide& side, float (&acc)[2][64],
                                                const int* positions, int lane) {
    if (side.n_rot != p.head_dim || side.bias != nullptr || side.norm != nullptr) return false;
    if (p.rope_neox != 0 && p.head_dim != 128 && p.head_dim != 64) return false;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int pos[2] = {positions[16 * m + lane / 4], positions[16 * m + lane / 4 + 8]};
        turn_keys(p, acc[m], lane, [&](int plane, float2(&of)[2]) __attribute__((always_inline)) {
            const uint64_t phase = p.phases[plane];
#pragma unroll
            for (int i = 0; i < 2; i++) of[i] = angle_of(phase, pos[i]);
        });
    }
    return true;
}

}  // namespace lkv::cuda
