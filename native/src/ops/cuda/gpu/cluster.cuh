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

// Which of them this is.
__device__ inline int cluster_rank() {
    uint32_t rank = 0;
    if constexpr (has_clusters) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}

// A barrier of all threads of all blocks, in two halves: what was stored before the first is seen behind the second.
__device__ inline void cluster_arrive() {
    if constexpr (has_clusters) asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
    if constexpr (has_clusters) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// The first half where nothing is handed over: barriers that are made in shared memory, and what they count, have an order of their own.
__device__ inline void cluster_arrive_relaxed() {
    if constexpr (has_clusters) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
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

// to: from in_block
__device__ inline void store_there(uint32_t to, float2 x) {
    if constexpr (has_clusters) {
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x.x), "f"(x.y) : "memory");
    }
}

}  // namespace lkv::cuda
