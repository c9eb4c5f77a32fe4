// ops/cuda/bulk_copy.cuh on the emulated GPU.
#pragma once

#include <cuda_runtime_api.h>

namespace lkv::cuda {

inline const bool has_bulk_copies = emulated::hopper();

// A barrier of shared memory by its address, which may be another thread block's.
struct EmulatedBarrier {
    uint64_t expected : 16, pending : 16, phase : 1, missing : 31;  // missing: bytes, modulo 2^31

    static EmulatedBarrier& at(uint32_t address) {
        return *static_cast<EmulatedBarrier*>(emulated::at_address(address));
    }
    static void change(uint32_t address, uint32_t arrivals, uint32_t announced, uint32_t copied) {
        emulated::lock();
        EmulatedBarrier& barrier = at(address);
        if (arrivals > barrier.pending) emulated::fail("no more arrivals at a barrier than it counts");
        barrier.pending = barrier.pending - arrivals;
        barrier.missing = barrier.missing + announced - copied;
        if (barrier.pending == 0 && barrier.missing == 0) {
            barrier.pending = barrier.expected;
            barrier.phase = barrier.phase ^ 1;
            emulated::advance();
        }
        emulated::unlock();
    }
    static void copy(uint32_t address, void* dst, const void* src, uint32_t bytes) {
        if ((emulated::word_of(dst) | emulated::word_of(src) | bytes) % 16 != 0) {
            emulated::fail("multiples of 16 of the copy engine");
        }
        emulated::lock();
        std::memcpy(dst, src, bytes);
        emulated::unlock();
        change(address, 0, 0, bytes);
    }
};
static_assert(sizeof(EmulatedBarrier) == sizeof(uint64_t));

// Not there and always open without bulk copies.
class Arrivals {
public:
    explicit Arrivals(uint64_t* at) : at_(emulated::address_of(at)) {}

    void init(int count = 1) const {
        if (!emulated::hopper()) return;
        const auto n = static_cast<uint64_t>(count);
        emulated::lock();
        EmulatedBarrier::at(at_) = {n, n, 0, 0};
        emulated::unlock();
    }
    void arrive() const {
        if (emulated::hopper()) EmulatedBarrier::change(at_, 1, 0, 0);
    }
    void announce(uint32_t bytes) const {
        if (emulated::hopper()) EmulatedBarrier::change(at_, 1, bytes, 0);
    }
    void copy(void* dst, const void* src, uint32_t bytes) const {
        emulated::needs_hopper("a GPU with a copy engine");
        EmulatedBarrier::copy(at_, dst, src, bytes);
    }
    void wait(uint32_t phase) const {
        if (!emulated::hopper()) return;
        const auto open = [&] {
            emulated::lock();
            const bool is_open = EmulatedBarrier::at(at_).phase != phase;
            emulated::unlock();
            return is_open;
        };
        while (!open()) emulated::yield();
    }

private:
    uint32_t at_;
};

inline void before_async_access() {}

}  // namespace lkv::cuda
