// Loaded before a CUDA program (consumer.py), these functions stand before the CUDA runtime's: they report the card, refuse
// what it has not, and let the companion's streams go first. The program must have code for the card's compute capability,
// and link the CUDA runtime as a shared library.
//
// cuBLAS asks the driver and not the runtime: its kernels are those of the GPU that is here.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "companion.h"
#include "real.h"

namespace consumer {

namespace {

thread_local bool inside = false;  // the companion's own calls

template <class F>
void find(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
    if (function != nullptr) return;
    std::fprintf(stderr, "[consumer] expected the CUDA runtime behind this library; got no %s\n", name);
    std::_Exit(2);
}

Companion& companion() {
    static auto* companion = new Companion;  // its thread may outlive what exit() destroys
    return *companion;
}

void start() {
    static std::once_flag started;
    if (inside) return;
    inside = true;
    std::call_once(started, [] {
        companion().start();
        std::atexit([] {
            inside = true;
            companion().end();
        });
    });
    inside = false;
}

int most_blocks(const void* kernel, int threads, size_t shared) {
    cudaFuncAttributes of{};
    if (cudaFuncGetAttributes(&of, kernel) != cudaSuccess) return 0;
    const auto reserved = size_t{1024};
    return std::min(static_cast<int>((card().shared_bytes + reserved) / (shared + of.sharedSizeBytes + reserved)),
                    card().threads / std::max(threads, 1));
}

}  // namespace

const Runtime& real_runtime() {
    static const Runtime runtime = [] {
        Runtime found{};
#define FIND(name) find(found.name, #name)
        FIND(cudaGetDeviceProperties);
        FIND(cudaDeviceGetAttribute);
        FIND(cudaFuncSetAttribute);
        FIND(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags);
        FIND(cudaStreamCreateWithPriority);
#undef FIND
        return found;
    }();
    return runtime;
}

}  // namespace consumer

using namespace consumer;

#define SHOWN extern "C" __attribute__((visibility("default"))) cudaError_t

SHOWN cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    start();
    const cudaError_t error = real_runtime().cudaGetDeviceProperties(properties, device);
    if (error != cudaSuccess || inside) return error;
    properties->major = card().major;
    properties->minor = card().minor;
    properties->multiProcessorCount = companion().multiprocessors();
    properties->sharedMemPerBlockOptin = static_cast<size_t>(card().shared_bytes);
    properties->sharedMemPerMultiprocessor = static_cast<size_t>(card().shared_bytes) + 1024;
    properties->maxThreadsPerMultiProcessor = card().threads;
    return error;
}

SHOWN cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    start();
    const cudaError_t error = real_runtime().cudaDeviceGetAttribute(value, attribute, device);
    if (error != cudaSuccess || inside) return error;
    if (attribute == cudaDevAttrMultiProcessorCount) *value = companion().multiprocessors();
    if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = card().shared_bytes;
    if (attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor) *value = card().shared_bytes + 1024;
    if (attribute == cudaDevAttrMaxThreadsPerMultiProcessor) *value = card().threads;
    if (attribute == cudaDevAttrComputeCapabilityMajor) *value = card().major;
    if (attribute == cudaDevAttrComputeCapabilityMinor) *value = card().minor;
    return error;
}

SHOWN cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    if (!inside && attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > card().shared_bytes) {
        std::fprintf(stderr, "[consumer] refused %d bytes of shared memory a block\n", value);
        return cudaErrorInvalidValue;
    }
    return real_runtime().cudaFuncSetAttribute(kernel, attribute, value);
}

SHOWN cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel, int threads,
                                                             size_t shared, unsigned flags) {
    const cudaError_t error =
        real_runtime().cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared, flags);
    if (error == cudaSuccess && !inside) *blocks = std::min(*blocks, most_blocks(kernel, threads, shared));
    return error;
}

SHOWN cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared,
                                                                  cudaOccupancyDefault);
}

// GB/s that a light kernel reads now; a program may ask between its steps (bench/gpu/beside.py). steer: after the readers' rate
// has followed it to the card's.
extern "C" __attribute__((visibility("default"))) double consumer_light_gb_per_s(int steer) {
    inside = true;
    const double found = (steer ? companion().steer() : companion().light()) * 1e-9;
    inside = false;
    return found;
}

extern "C" __attribute__((visibility("default"))) double consumer_sm_mhz() {
    inside = true;
    const double found = companion().mhz();
    inside = false;
    return found;
}

// Behind the readers, whatever the program asks for.
SHOWN cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    start();
    int least = priority;
    int most = 0;
    if (!inside) cudaDeviceGetStreamPriorityRange(&least, &most);
    return real_runtime().cudaStreamCreateWithPriority(stream, flags, least);
}
