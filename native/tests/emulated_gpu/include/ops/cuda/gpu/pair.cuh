// ops/cuda/pair.cuh on the emulated GPU.
#pragma once

#include "ops/cuda/gpu/bulk_copy.cuh"
#include "ops/cuda/gpu/cluster.cuh"

namespace lkv::cuda {

inline int pair_rank() { return cluster_rank(); }
inline void pair_barrier() {
    cluster_arrive();
    cluster_wait();
}
inline uint32_t in_peer(const void* at) { return in_block(at, pair_rank() ^ 1); }

class Peer {
public:
    explicit Peer(const void*) {}
    int rank() const { return pair_rank(); }
    uint32_t operator()(const void* at) const { return in_peer(at); }
};

template <class T>
void send(uint32_t to, T x, uint32_t arrivals) {
    emulated_store(to, x);
    EmulatedBarrier::change(arrivals, 0, 0, sizeof x);
}
inline void arrive_there(uint32_t arrivals) { EmulatedBarrier::change(arrivals, 1, 0, 0); }
inline void announce_there(uint32_t arrivals, uint32_t bytes) { EmulatedBarrier::change(arrivals, 1, bytes, 0); }
inline void copy_there(uint32_t to, const void* from, uint32_t bytes, uint32_t arrivals) {
    EmulatedBarrier::copy(arrivals, emulated::at_address(to), from, bytes);
}

}  // namespace lkv::cuda
