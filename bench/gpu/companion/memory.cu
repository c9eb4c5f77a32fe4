#include "memory.h"

#include <cuda_runtime.h>

namespace consumer {

namespace {

constexpr int stage_bytes = 16 * 1024;
constexpr int n_stages = 13;               // 208 KB in flight
constexpr int block_shared = 227 * 1024;   // of 228 KB, and 1 KB is the system's: no other block fits
constexpr int64_t handed_over_ns = 20'000;  // before it ends, the next reading may start

__device__ int64_t now_ns() {
    int64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

__device__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// One thread a block asks for chunk after chunk, each when it is due: what memory cannot deliver in time is asked for later,
// so that a program beside it gets no more than what is left.
__global__ void __launch_bounds__(32) stream_memory(const char* buffer, size_t n_chunks, bool prefetch,
                                                    double chunks_per_ns, int64_t ns, uint64_t first,
                                                    unsigned long long* read) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char stages[];
    auto* arrived = reinterpret_cast<uint64_t*>(stages + n_stages * stage_bytes);
    uint64_t once;  // leaves L2 to the program
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    for (int s = 0; s < n_stages; s++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrived + s)));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const auto ask = [&](int s, const char* from) {
        if (prefetch) {
            asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from), "r"(stage_bytes),
                         "l"(once)
                         : "memory");
            return;
        }
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived + s)),
                     "r"(stage_bytes)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                shared_address(stages + s * stage_bytes)),
            "l"(from), "r"(stage_bytes), "r"(shared_address(arrived + s)), "l"(once)
            : "memory");
    };
    const auto wait = [&](int s, uint32_t parity) {
        uint32_t done = prefetch;
        while (!done) {
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done)
                         : "r"(shared_address(arrived + s)), "r"(parity)
                         : "memory");
        }
    };
    const int64_t begin = now_ns();
    const int64_t end = begin + ns;
    bool handed_over = false;
    uint64_t asked = 0;
    uint64_t skipped = 0;  // chunks that were due and will not be asked for any more
    while (true) {
        const int64_t now = now_ns();
        if (now >= end) break;
        if (!handed_over && now >= end - handed_over_ns) {
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
            handed_over = true;
        }
        if (chunks_per_ns > 0.0) {
            const auto due = static_cast<uint64_t>(static_cast<double>(now - begin) * chunks_per_ns);
            if (asked + skipped >= due) continue;
            if (due - asked - skipped > 64) skipped = due - asked - 64;
        }
        const int s = static_cast<int>(asked % n_stages);
        if (asked >= n_stages) wait(s, static_cast<uint32_t>(asked / n_stages - 1) & 1);
        ask(s, buffer + (first + blockIdx.x + asked * gridDim.x) % n_chunks * stage_bytes);
        asked++;
    }
    for (uint64_t n = asked < n_stages ? 0 : asked - n_stages; n < asked; n++)
        wait(static_cast<int>(n % n_stages), static_cast<uint32_t>(n / n_stages) & 1);
    atomicAdd(read, static_cast<unsigned long long>(asked * stage_bytes));
#endif
}

__global__ void copy(const uint4* from, uint4* to, size_t n) {
    const size_t step = size_t{gridDim.x} * blockDim.x;
    for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += 4 * step) {
        uint4 values[4];
        for (int j = 0; j < 4; j++) {
            if (i + j * step < n) values[j] = __ldcs(from + i + j * step);
        }
        for (int j = 0; j < 4; j++) {
            if (i + j * step < n) __stcs(to + i + j * step, values[j]);
        }
    }
}

__global__ void visit(unsigned* seen) {
    unsigned at;
    asm volatile("mov.u32 %0, %smid;" : "=r"(at));
    if (threadIdx.x == 0) atomicAdd(seen + at, 1u);
    const int64_t end = now_ns() + 20'000;
    while (now_ns() < end) {
    }
}

}  // namespace

cudaError_t prepare() {
    return cudaFuncSetAttribute(stream_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, block_shared);
}

cudaError_t read_memory(const Reading& reading, cudaStream_t stream) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(reading.blocks));
    config.blockDim = dim3(1);
    config.dynamicSmemBytes = block_shared;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, stream_memory, reading.buffer, reading.bytes / stage_bytes,
                              reading.way == Way::prefetch,
                              reading.bytes_per_second / reading.blocks / stage_bytes * 1e-9, reading.ns, reading.first,
                              reading.read);
}

cudaError_t copy_memory(const void* from, void* to, size_t n, cudaStream_t stream) {
    copy<<<2048, 512, 0, stream>>>(static_cast<const uint4*>(from), static_cast<uint4*>(to), n / sizeof(uint4));
    return cudaGetLastError();
}

cudaError_t visit_multiprocessors(unsigned* seen, int blocks, cudaStream_t stream) {
    visit<<<blocks, 1024, 0, stream>>>(seen);
    return cudaGetLastError();
}

}  // namespace consumer
