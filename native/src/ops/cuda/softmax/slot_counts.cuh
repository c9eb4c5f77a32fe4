// The slots in use, read on the device: one captured graph serves a cache as it fills.
#pragma once

#include "ops/cuda/problem.h"

namespace lkv::cuda {

// a / b, neither of them negative: exact for a below 2^20, and four instructions where a division has some 25, one behind the other. A
// decode kernel's set-up, which runs once, had dozens of those.
__device__ inline int small_quotient(int a, int b) {
    return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// The used slots of every region, read on the device.
struct SlotCounts {
    int32_t of[max_regions];

    __device__ explicit SlotCounts(const Problem& p) {
#pragma unroll
        for (int r = 0; r < max_regions; r++) of[r] = r < p.n_regions ? p.n_slots[r] : 0;
    }
    // As they were stored, of all regions.
    __device__ explicit SlotCounts(const int32_t* n_slots) {
#pragma unroll
        for (int r = 0; r < max_regions; r++) of[r] = n_slots[r];
    }
};

}  // namespace lkv::cuda
