// Loaded before a CUDA program (consumer.py), it makes a data-center GPU resemble a consumer card:
//
//   - cudaGetDeviceProperties and cudaDeviceGetAttribute report the card's compute capability and shared memory, and the
//     multiprocessors that are left;
//   - blocks that fill a multiprocessor's shared memory occupy the other multiprocessors and read memory as fast as they are
//     told, until a plain copy beside them moves as many bytes a second as the card's memory does.
//
// The program must have code for the card's compute capability, and link the CUDA runtime as a shared library.
// Not imitated: L2, clocks, registers, latencies and the speed of the tensor cores.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int stage_bytes = 16 * 1024;
constexpr int n_stages = 13;                      // 208 KB in flight
constexpr int block_shared = 227 * 1024;          // of 228 KB: nothing else runs there
constexpr int64_t burst_ns = 2'000'000;           // a device-wide synchronization of the program waits as long
constexpr size_t buffer_bytes = size_t{2} << 30;  // far beyond L2
constexpr size_t copied_bytes = size_t{1} << 30;

struct Card {
    double bytes_per_second;
    int shared_kilobytes;
    int major;
    int minor;
    int multiprocessors;
};

double number_of(const char* name) {
    const char* text = std::getenv(name);
    return text ? std::atof(text) : 0.0;
}

const Card& card() {
    static const Card card{number_of("CONSUMER_GB_PER_S") * 1e9, static_cast<int>(number_of("CONSUMER_SHARED_KB")),
                           static_cast<int>(number_of("CONSUMER_CAPABILITY")) / 10,
                           static_cast<int>(number_of("CONSUMER_CAPABILITY")) % 10,
                           static_cast<int>(number_of("CONSUMER_MULTIPROCESSORS"))};
    return card;
}

template <class F>
F next(const char* name) {
    return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "[consumer] expected %s; got %s\n", what, cudaGetErrorString(error));
    std::_Exit(2);
}

__device__ int64_t now_ns() {
    int64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

__device__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// One thread a block keeps n_stages bulk copies into shared memory in flight for burst_ns, with pause_ns between two.
__global__ void stream_memory(const char* buffer, size_t n_chunks, int pause_ns, uint64_t first) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char stages[];
    auto* arrived = reinterpret_cast<uint64_t*>(stages + n_stages * stage_bytes);
    const int64_t end = now_ns() + burst_ns;
    for (int s = 0; s < n_stages; s++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrived + s)));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const auto read = [&](int s, size_t chunk) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived + s)),
                     "r"(stage_bytes)
                     : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(stages + s * stage_bytes)),
                     "l"(buffer + chunk % n_chunks * stage_bytes), "r"(stage_bytes), "r"(shared_address(arrived + s))
                     : "memory");
    };
    const auto wait = [&](int s, uint32_t parity) {
        uint32_t done = 0;
        while (!done) {
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done)
                         : "r"(shared_address(arrived + s)), "r"(parity)
                         : "memory");
        }
    };
    size_t chunk = first + blockIdx.x;
    for (int s = 0; s < n_stages; s++, chunk += gridDim.x) read(s, chunk);
    uint32_t parity = 0;
    while (now_ns() < end) {
        for (int s = 0; s < n_stages; s++, chunk += gridDim.x) {
            wait(s, parity);
            read(s, chunk);
            for (int left = pause_ns; left > 0; left -= 500) __nanosleep(min(left, 500));
        }
        parity ^= 1;
    }
    for (int s = 0; s < n_stages; s++) wait(s, parity);
#endif
}

__global__ void copy_memory(const uint4* from, uint4* to, size_t n) {
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

// Streams memory on `blocks` multiprocessors until it is told to end.
class Companion {
public:
    void start() {
        check(cudaGetDevice(&device_), "a device");
        int real = 0;
        check(next<decltype(&cudaDeviceGetAttribute)>("cudaDeviceGetAttribute")(&real, cudaDevAttrMultiProcessorCount,
                                                                                device_),
              "a count of multiprocessors");
        check(cudaMalloc(&buffer_, buffer_bytes), "2 GiB of GPU memory to read");
        check(cudaMalloc(&copied_, 2 * copied_bytes), "2 GiB of GPU memory to copy");
        check(cudaMemset(buffer_, 1, buffer_bytes), "memory that can be written");
        check(cudaMemset(copied_, 1, 2 * copied_bytes), "memory that can be written");
        check(cudaFuncSetAttribute(stream_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, block_shared),
              "227 KB of shared memory a block");
        runner_ = std::thread([this] { run(); });
        runner_.detach();
        choose(real);
        left_ = real - blocks_;
        say("before");
    }

    int multiprocessors() const { return left_; }

    void say(const char* when) {
        std::fprintf(stderr, "[consumer] %s: %d multiprocessors left, a copy moves %.2f TB/s of %.2f\n", when, left_,
                     copy() / 1e12, card().bytes_per_second / 1e12);
    }

private:
    // The fewest blocks that leave no more than the card's bandwidth, then the longest pause that still does.
    void choose(int real) {
        const double unlimited = copy();
        int low = std::max(1, real - card().multiprocessors);
        int high = real - 8;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (copy_beside(middle, 0) > card().bytes_per_second) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        int pause = 0;
        for (int step = 4096; step >= 16; step /= 2) {
            if (copy_beside(low, pause + step) <= card().bytes_per_second) pause += step;
        }
        copy_beside(low, pause);
        std::fprintf(
            stderr,
            "[consumer] a copy alone moves %.2f TB/s; %d of %d multiprocessors read, %d ns between two chunks\n",
            unlimited / 1e12, low, real, pause);
    }

    double copy_beside(int blocks, int pause) {
        pause_ = pause;
        blocks_ = blocks;
        std::this_thread::sleep_for(std::chrono::nanoseconds(6 * burst_ns));  // bursts of the old kind end
        return copy();
    }

    // Bytes read and written in a second, the median of five copies.
    double copy() {
        cudaStream_t stream;
        cudaEvent_t begin, end;
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
        check(cudaEventCreate(&begin), "an event");
        check(cudaEventCreate(&end), "an event");
        std::vector<double> rates;
        for (int i = 0; i < 6; i++) {
            check(cudaEventRecord(begin, stream), "an event");
            copy_memory<<<2048, 512, 0, stream>>>(reinterpret_cast<uint4*>(copied_),
                                                  reinterpret_cast<uint4*>(copied_ + copied_bytes),
                                                  copied_bytes / sizeof(uint4));
            check(cudaEventRecord(end, stream), "an event");
            check(cudaEventSynchronize(end), "a copy");
            float ms = 0.0f;
            check(cudaEventElapsedTime(&ms, begin, end), "a time");
            if (i > 0) rates.push_back(2.0 * copied_bytes / (ms * 1e-3));
        }
        cudaEventDestroy(begin);
        cudaEventDestroy(end);
        cudaStreamDestroy(stream);
        std::sort(rates.begin(), rates.end());
        return rates[rates.size() / 2];
    }

    // Two bursts are queued at a time, in streams before which the program's work waits.
    void run() {
        check(cudaSetDevice(device_), "the device");
        int least = 0;
        int most = 0;
        check(cudaDeviceGetStreamPriorityRange(&least, &most), "priorities");
        cudaStream_t streams[2];
        cudaEvent_t ends[2];
        for (int i = 0; i < 2; i++) {
            check(cudaStreamCreateWithPriority(&streams[i], cudaStreamNonBlocking, most), "a stream");
            check(cudaEventCreateWithFlags(&ends[i], cudaEventDisableTiming | cudaEventBlockingSync), "an event");
        }
        for (uint64_t n = 0;; n++) {
            const int i = static_cast<int>(n % 2);
            if (n >= 2) check(cudaEventSynchronize(ends[i]), "a burst of reading");
            const int blocks = blocks_;
            if (blocks > 0) {
                stream_memory<<<blocks, 1, block_shared, streams[i]>>>(buffer_, buffer_bytes / stage_bytes, pause_,
                                                                       n * 7919);
                check(cudaGetLastError(), "a burst of reading to start");
            } else {
                std::this_thread::sleep_for(std::chrono::nanoseconds(burst_ns));
            }
            check(cudaEventRecord(ends[i], streams[i]), "an event");
        }
    }

    int device_ = 0;
    int left_ = 0;
    char* buffer_ = nullptr;
    char* copied_ = nullptr;
    std::atomic<int> blocks_{0};
    std::atomic<int> pause_{0};
    std::thread runner_;
};

Companion companion;
std::once_flag started;
thread_local bool inside = false;  // of start(), whose own calls are no program's

void start() {
    if (inside) return;
    std::call_once(started, [] {
        inside = true;
        companion.start();
        std::atexit([] {
            inside = true;
            companion.say("after");
        });
        inside = false;
    });
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    start();
    const cudaError_t error = next<decltype(&cudaGetDeviceProperties)>("cudaGetDeviceProperties")(properties, device);
    if (error != cudaSuccess || inside) return error;
    properties->major = card().major;
    properties->minor = card().minor;
    properties->multiProcessorCount = companion.multiprocessors();
    properties->sharedMemPerBlockOptin = static_cast<size_t>(card().shared_kilobytes) * 1024;
    properties->sharedMemPerMultiprocessor = static_cast<size_t>(card().shared_kilobytes + 1) * 1024;
    return error;
}

// nvcc's own header defines a function of this name.
__attribute__((visibility("default"))) cudaError_t report_attribute(int* value, cudaDeviceAttr attribute,
                                                                    int device) __asm__("cudaDeviceGetAttribute");
cudaError_t report_attribute(int* value, cudaDeviceAttr attribute, int device) {
    if (!inside) start();
    const cudaError_t error =
        next<decltype(&cudaDeviceGetAttribute)>("cudaDeviceGetAttribute")(value, attribute, device);
    if (error != cudaSuccess || inside) return error;
    if (attribute == cudaDevAttrMultiProcessorCount) *value = companion.multiprocessors();
    if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = card().shared_kilobytes * 1024;
    if (attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor) *value = (card().shared_kilobytes + 1) * 1024;
    if (attribute == cudaDevAttrComputeCapabilityMajor) *value = card().major;
    if (attribute == cudaDevAttrComputeCapabilityMinor) *value = card().minor;
    return error;
}
}
