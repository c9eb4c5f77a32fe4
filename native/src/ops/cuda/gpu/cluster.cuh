// Thread blocks of a cluster (compute capability 9.0): they run at the same time and see each other's shared memory.
#pragma once

#include <cstdint>

namespace lkv::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool has_clusters = true;
#else
constexpr bool has_clusters = false;
#endif

constexpr int largest_cluster = 8;  // thread blocks, on every GPU that has clusters

// 1 where there are no clusters.
__device__ inline int cluster_blocks() {
    uint32_t n = 1;
    if constexpr (has_clusters) asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
    return static_cast<int>(n);
}

// A barrier of all threads of all blocks, in two halves. Nothing else is handed over: barriers that are made in shared memory, and what they
// count, have an order of their own.
__device__ inline void cluster_arrive_relaxed() {
    if constexpr (has_clusters) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
    if constexpr (has_clusters) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// The place in block `rank`'s shared memory that `at` is in this one's.
__device__ inline uint32_t in_block(const void* at, int rank) {
    uint32_t there = 0;
    if constexpr (has_clusters) {
        const auto here = static_cast<uint32_t>(__cvta_generic_to_shared(at));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    }
    return there;
}

// Four bytes to another block's `to`, counted by its barrier `arrivals` (both from in_block).
__device__ inline void send(uint32_t to, float x, uint32_t arrivals) {
    if constexpr (has_clusters) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(x),
                     "r"(arrivals)
                     : "memory");
    }
}

}  // namespace lkv::cuda
