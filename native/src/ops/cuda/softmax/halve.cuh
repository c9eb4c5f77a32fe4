// Sums and maxima over the lanes of a warp. Sums by halves: each lane keeps half of its values and gives the other half away, so that
// sums of 16 values over 16 lanes take 15 exchanges; one after another they take 64.
#pragma once

namespace lkv::cuda {

// Two lanes are `by` apart: the upper one is left with the sums of of[half … 2·half - 1], the other with those of of[0 … half - 1], both
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

// The sum over eight lanes four apart of one of n values: of n / 8 lanes each, counted by the lanes' bits 4, 3 and 2.
template <int n, int by = 16>
__device__ inline float sum_of_eight(float (&x)[n], int lane) {
    if constexpr (by < 4) {
        return x[0];
    } else if constexpr (n == 1) {
        return x[0] + __shfl_xor_sync(0xffffffffu, x[0], by);
    } else {
        halve(x, n / 2, by, (lane & by) != 0);
        float left[n / 2];
#pragma unroll
        for (int i = 0; i < n / 2; i++) left[i] = x[i];
        return sum_of_eight<n / 2, by / 2>(left, lane);
    }
}

__device__ inline float warp_max(float x) {
    // integers have an instruction for it; negative floats are in reverse order
    const auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(ordered(__reduce_max_sync(0xffffffffu, ordered(__float_as_int(x)))));
}

}  // namespace lkv::cuda
