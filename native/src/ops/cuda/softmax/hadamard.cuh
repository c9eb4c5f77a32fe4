// 64 neighbouring channels times the Hadamard matrix that V is stored with.
#pragma once

namespace lkv::cuda {

// By a warp, whose lane has channels `lane` and lane + 32. n: channels of the matrix, a power of two up to 64
__device__ inline void times_hadamard(float (&of)[2], int n, int lane) {
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        if (apart >= n) break;
        const float sign = (lane & apart) == 0 ? 1.0f : -1.0f;
        of[0] = fmaf(sign, of[0], __shfl_xor_sync(0xffffffffu, of[0], apart));
        of[1] = fmaf(sign, of[1], __shfl_xor_sync(0xffffffffu, of[1], apart));
    }
    if (n == 64) {
        const float sum = of[0] + of[1];
        of[1] = of[0] - of[1];
        of[0] = sum;
    }
    const float scale = rsqrtf(static_cast<float>(n));
    of[0] *= scale;
    of[1] *= scale;
}

}  // namespace lkv::cuda
