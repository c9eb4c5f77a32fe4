// Two thread blocks of a cluster (compute capability 9.0) that hold half of a sum each: what one sends, the other finds in its own
// shared memory, without a barrier between them.
#pragma once

#include <cstdint>

#include "ops/cuda/bulk_copy.cuh"

namespace lkv::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool has_clusters = true;
#else
constexpr bool has_clusters = false;
#endif

// Which of the two this is, 0 or 1.
__device__ inline int pair_rank() {
    uint32_t rank = 0;
    if constexpr (has_clusters) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}

// A barrier of all threads of both.
__device__ inline void pair_barrier() {
    if constexpr (has_clusters) {
        asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    }
}

// The place in the other's shared memory that `at` is in this one's.
__device__ inline uint32_t in_peer(const void* at) {
    uint32_t there = 0;
    if constexpr (has_clusters) {
        const auto here = static_cast<uint32_t>(__cvta_generic_to_shared(at));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(pair_rank() ^ 1));
    }
    return there;
}

// Eight bytes to the other's `to`, counted by its barrier `arrivals` (both from in_peer).
__device__ inline void send(uint32_t to, float2 x, uint32_t arrivals) {
    if constexpr (has_clusters) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
                     "f"(x.x), "f"(x.y), "r"(arrivals)
                     : "memory");
    }
}

}  // namespace lkv::cuda
