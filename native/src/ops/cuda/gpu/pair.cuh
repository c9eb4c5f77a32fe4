// Two thread blocks of a cluster (compute capability 9.0) that hold half of a sum each: what one sends, the other finds in its own
// shared memory, without a barrier between them.
#pragma once

#include <cstdint>

#include "ops/cuda/gpu/bulk_copy.cuh"
#include "ops/cuda/gpu/cluster.cuh"

namespace lkv::cuda {

// Which of the two this is, 0 or 1.
__device__ inline int pair_rank() { return cluster_rank(); }

// A barrier of all threads of both.
__device__ inline void pair_barrier() {
    cluster_arrive();
    cluster_wait();
}

// The place in the other's shared memory that `at` is in this one's.
__device__ inline uint32_t in_peer(const void* at) { return in_block(at, pair_rank() ^ 1); }

// The same for loops: the rank is read once and kept in a register, since reading it anew wherever it is used takes some 40 cycles, which the
// compiler prefers.
class Peer {
public:
    // any: in shared memory
    __device__ explicit Peer(const void* any) {
        if constexpr (has_clusters) {
            asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank_));
            const auto here = static_cast<uint32_t>(__cvta_generic_to_shared(any));
            uint32_t there;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank_ ^ 1));
            offset_ = there - here;
        }
    }
    __device__ int rank() const { return static_cast<int>(rank_); }
    __device__ uint32_t operator()(const void* at) const {
        return static_cast<uint32_t>(__cvta_generic_to_shared(at)) + offset_;
    }

private:
    uint32_t rank_ = 0;
    uint32_t offset_ = 0;
};

// Eight bytes to the other's `to`, counted by its barrier `arrivals` (both from in_peer).
__device__ inline void send(uint32_t to, float2 x, uint32_t arrivals) {
    if constexpr (has_clusters) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
                     "f"(x.x), "f"(x.y), "r"(arrivals)
                     : "memory");
    }
}

// The same of four bytes.
__device__ inline void send(uint32_t to, float x, uint32_t arrivals) {
    if constexpr (has_clusters) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(x),
                     "r"(arrivals)
                     : "memory");
    }
}

// Arrives at the other's barrier (from in_peer).
__device__ inline void arrive_there(uint32_t arrivals) {
    if constexpr (has_clusters) {
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(arrivals) : "memory");
    }
}
// The same, and this many bytes will follow.
__device__ inline void announce_there(uint32_t arrivals, uint32_t bytes) {
    if constexpr (has_clusters) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(arrivals), "r"(bytes)
                     : "memory");
    }
}
// From shared memory to the other's `to`, by the copy engine. bytes and both addresses: multiples of 16
__device__ inline void copy_there(uint32_t to, const void* from, uint32_t bytes, uint32_t arrivals) {
    if constexpr (has_clusters) {
        asm volatile(
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
            "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))), "r"(bytes), "r"(arrivals)
            : "memory");
    }
}

}  // namespace lkv::cuda
