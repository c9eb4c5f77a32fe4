// Whole rows by the copy engine (compute capability 9.0): one instruction a row instead of one for 16 bytes of it, which were a
// fifth of the wide kernel's instructions with rows of f16.
#pragma once

#include <cstdint>

namespace lkv::cuda {

// Elsewhere threads copy by cp.async.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool has_bulk_copies = true;
#else
constexpr bool has_bulk_copies = false;
#endif

// A barrier in shared memory that opens once one thread (or `count`) has arrived, and as many bytes as were announced. Each opening
// is a phase; phases are even and odd in turn, the first is even. Without bulk copies it is not there and always open.
class Arrivals {
public:
    __device__ explicit Arrivals(uint64_t* at) : at_(static_cast<uint32_t>(__cvta_generic_to_shared(at))) {}

    // By one thread; a barrier of all threads follows.
    __device__ void init(int count = 1) const {
        if constexpr (has_bulk_copies) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at_), "r"(count) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
    }
    __device__ void arrive() const {
        if constexpr (has_bulk_copies) {
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at_) : "memory");
        }
    }
    // Arrives too. By one thread, once a phase; bytes may be 0.
    __device__ void announce(uint32_t bytes) const {
        if constexpr (has_bulk_copies) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at_), "r"(bytes) : "memory");
        }
    }
    // bytes and both addresses: multiples of 16
    __device__ void copy(void* dst, const void* src, uint32_t bytes) const {
        if constexpr (has_bulk_copies) {
            const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(dst));
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                "l"(src), "r"(bytes), "r"(at_)
                : "memory");
        }
    }
    __device__ void wait(uint32_t phase) const {
        if constexpr (has_bulk_copies) {
            asm volatile(
                "{\n"
                ".reg .pred open;\n"
                "again:\n"
                "mbarrier.try_wait.parity.shared::cta.b64 open, [%0], %1;\n"
                "@!open bra again;\n"
                "}\n" ::"r"(at_),
                "r"(phase)
                : "memory");
        }
    }

private:
    uint32_t at_;
};

// Between a thread's own stores to shared memory and what the copy engine or products by warpgroups do there; a barrier comes
// between them too.
__device__ inline void before_async_access() {
    if constexpr (has_bulk_copies) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace lkv::cuda
