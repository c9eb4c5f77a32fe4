// RoPE of expanded keys in registers.
#pragma once

#include "ops/cuda/expand/latents.cuh"
#include "ops/cuda/step/finish_key.cuh"

namespace lkv::cuda {

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
