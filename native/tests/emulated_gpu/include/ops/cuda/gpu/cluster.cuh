// ops/cuda/cluster.cuh on the emulated GPU.
#pragma once

#include "ops/cuda/gpu/bulk_copy.cuh"

namespace lkv::cuda {

inline const bool has_clusters = emulated::hopper();
constexpr int largest_cluster = 8;

inline int cluster_blocks() { return emulated::n_ranks(); }
inline void cluster_arrive_relaxed() { emulated::cluster_barrier_arrive(); }
inline void cluster_wait() { emulated::cluster_barrier_wait(); }
inline uint32_t in_block(const void* at, int rank) { return emulated::address_in(emulated::address_of(at), rank); }
template <class T>
void emulated_store(uint32_t to, const T& x) {
    emulated::lock();
    std::memcpy(emulated::at_address(to), &x, sizeof x);
    emulated::unlock();
}
inline void send(uint32_t to, float x, uint32_t arrivals) {
    emulated_store(to, x);
    EmulatedBarrier::change(arrivals, 0, 0, sizeof x);
}

}  // namespace lkv::cuda
