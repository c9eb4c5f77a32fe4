// A step of sums over the lanes of a warp: each lane keeps half of its values and gives the other half away, so that sums of 16 values
// over 16 lanes take 15 exchanges; one after another they take 64.
#pragma once

namespace lkv::cuda {

// Of two lanes `by` apart the upper one is left with the sums of of[half … 2·half - 1], the other with those of of[0 … half - 1], both
// as of[0 … half - 1].
template <int V>
__device__ inline void halve(float (&of)[V], int half, int by, bool upper) {
#pragma unroll
    for (int i = 0; i < half; i++) {
        const float keep = upper ? of[half + i] : of[i];
        const float give = upper ? of[i] : of[half + i];
        of[i] = keep + __shfl_xor_sync(0xffffffffu, give, by);
    }
}

}  // namespace lkv::cuda
