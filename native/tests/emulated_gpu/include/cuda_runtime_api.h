// CUDA's runtime and language on the emulated GPU, as far as the kernels and their tests use them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "chain.h"
#include "device.h"

#define CUDART_VERSION 12000
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static thread_local

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// The runtime. Everything has happened when a call returns.
enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorMemoryAllocation,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorPeerAccessAlreadyEnabled = 704,
    cudaErrorNotSupported = 801,
    cudaErrorUnknown = 999
};
struct EmulatedStream {
    int device;
};
using cudaStream_t = EmulatedStream*;  // null: the current device's
inline int emulated_device_of(cudaStream_t stream) { return stream == nullptr ? emulated::device() : stream->device; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error of the emulated GPU"; }
// What failed last, until it is asked for: of allocations, after which a program goes on.
inline cudaError_t cudaGetLastError() { return static_cast<cudaError_t>(std::exchange(emulated::last_error(), 0)); }
inline cudaError_t emulated_failure(cudaError_t error) {
    emulated::last_error() = error;
    return error;
}
inline cudaError_t cudaDeviceSynchronize() {
    emulated::end_chain();
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaDeviceSynchronize(); }

template <class T>
cudaError_t cudaMalloc(T** at, size_t bytes) {
    *at = static_cast<T*>(emulated::allocate(bytes, emulated::device()));
    return *at == nullptr ? emulated_failure(cudaErrorMemoryAllocation) : cudaSuccess;
}
inline cudaError_t cudaFree(void* at) {
    emulated::free(at);
    return cudaSuccess;
}
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToDevice, cudaMemcpyDeviceToHost };
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    emulated::open_all();
    if (bytes != 0) std::memcpy(to, from, bytes);
    emulated::copied_bytes += bytes;
    return cudaSuccess;
}
// Within one device; another's memory is copied by cudaMemcpyPeerAsync.
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    const int of = emulated_device_of(stream);
    for (const void* at : {static_cast<const void*>(to), from}) {
        if (const int there = emulated::device_of(at); there != emulated::host && there != of) {
            return cudaErrorInvalidValue;
        }
    }
    return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                                       cudaStream_t) {
    if (emulated::device_of(to) != to_device || emulated::device_of(from) != from_device) return cudaErrorInvalidValue;
    return cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice);
}
template <class T>
cudaError_t cudaMallocHost(T** at, size_t bytes) {
    *at = static_cast<T*>(emulated::allocate(bytes, emulated::host));
    return *at == nullptr ? emulated_failure(cudaErrorMemoryAllocation) : cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* at) { return cudaFree(at); }
inline cudaError_t cudaMemset(void* at, int byte, size_t bytes) {
    emulated::open_all();
    std::memset(at, byte, bytes);
    return cudaSuccess;
}

inline cudaError_t cudaGetDeviceCount(int* n) {
    *n = emulated::n_devices;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* id) {
    *id = emulated::device();
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int id) { return emulated::set_device(id) ? cudaSuccess : cudaErrorInvalidDevice; }
// Peers do not see each other's memory: copies go through the host, and kernels never may.
inline cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrComputeCapabilityMajor,
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? static_cast<int>(emulated::shared_bytes())
             : attribute == cudaDevAttrMultiProcessorCount        ? emulated::n_multiprocessors()
                                                                  : emulated::capability() / 10;
    return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int bytes) {
    return bytes <= static_cast<int>(emulated::shared_bytes()) ? cudaSuccess : cudaErrorInvalidValue;
}
struct cudaFuncAttributes {
    size_t sharedSizeBytes = 0;
    int ptxVersion = 0;
};
// as compiled for the GPU's compute capability; shared memory is asked of a probe alone, which has some for 9.0
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, Kernel) {
    *of = {emulated::hopper() ? size_t{1} : 0, emulated::capability()};
    return cudaSuccess;
}

enum cudaLaunchAttributeID {
    cudaLaunchAttributeProgrammaticStreamSerialization,
    cudaLaunchAttributeClusterDimension,
    cudaLaunchAttributePriority
};
struct cudaLaunchAttributeValue {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
    int priority;
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
    cudaLaunchAttribute* attrs = nullptr;
    unsigned numAttrs = 0;
};
// A stream is its device's alone.
template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), const Args&... args) {
    if (emulated_device_of(config->stream) != emulated::device()) return cudaErrorInvalidResourceHandle;
    dim3 cluster;
    bool early = false;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const cudaLaunchAttribute& attribute = config->attrs[i];
        if (attribute.id == cudaLaunchAttributeClusterDimension) cluster = attribute.val.clusterDim;
        if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
            early = attribute.val.programmaticStreamSerializationAllowed != 0;
        }
    }
    const bool launched = emulated::launch(config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes, early,
                                           [&] { kernel(args...); });
    return launched ? cudaSuccess : cudaErrorInvalidConfiguration;
}
// kernel<<<grid, threads, bytes, stream>>>(args …), see translate.py
template <class... Params, class... Args>
void emulated_launch(const char* name, void (*kernel)(Params...), dim3 grid, int threads, size_t bytes,
                     cudaStream_t stream, const Args&... args) {
    if (emulated_device_of(stream) != emulated::device()) emulated::fail("a stream of the current device");
    emulated::in_kernel(name);
    const dim3 block(static_cast<unsigned>(threads));
    if (!emulated::launch(grid, block, dim3(), bytes, false, [&] { kernel(args...); })) {
        emulated::fail("a grid and shared memory that a launch may ask for");
    }
}

// Streams wait for nothing: what was launched before has happened.
struct EmulatedEvent {
    int device;
};
using cudaEvent_t = EmulatedEvent*;
enum { cudaStreamNonBlocking, cudaEventDisableTiming };
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new EmulatedEvent{emulated::device()};
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return event->device == emulated_device_of(stream) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

// Recorded steps are not emulated: a recording does not begin, and nothing else of them is called.
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, int) { return cudaErrorNotSupported; }
using cudaGraph_t = struct EmulatedGraph*;
using cudaGraphNode_t = struct EmulatedNode*;
using cudaGraphExec_t = struct EmulatedExec*;
struct cudaGraphEdgeData {
    unsigned char from_port, to_port, type;
};
struct cudaKernelNodeParams {
    void** kernelParams;
};
enum {
    cudaStreamCaptureModeRelaxed,
    cudaGraphInstantiateFlagUseNodePriority,
    cudaGraphDependencyTypeProgrammatic,
    cudaGraphKernelNodePortProgrammatic,
    cudaGraphKernelNodePortLaunchCompletion
};
#define EMULATED_NEVER(name)                                           \
    template <class... Args>                                           \
    cudaError_t name(Args&&...) {                                      \
        emulated::fail("no call of " #name ", which is not emulated"); \
    }
EMULATED_NEVER(cudaDeviceEnablePeerAccess)
EMULATED_NEVER(cudaDeviceGetStreamPriorityRange)
EMULATED_NEVER(cudaGraphDestroy)
EMULATED_NEVER(cudaGraphExecDestroy)
EMULATED_NEVER(cudaGraphInstantiate)
EMULATED_NEVER(cudaGraphKernelNodeGetParams)
EMULATED_NEVER(cudaGraphLaunch)
EMULATED_NEVER(cudaStreamCreateWithPriority)
EMULATED_NEVER(cudaStreamDestroy)
EMULATED_NEVER(cudaStreamEndCapture)
#undef EMULATED_NEVER

// The language.
inline void cudaGridDependencySynchronize() { emulated::wait_for_grids(); }
inline void cudaTriggerProgrammaticLaunchCompletion() {}
inline void __syncthreads() { emulated::block_barrier(); }
inline int __syncthreads_or(int x) { return emulated::block_barrier(x); }
inline void __syncwarp() { emulated::exchange(0); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline long long clock64() { return emulated::clock(); }

template <class T>
T __shfl_sync(unsigned, T x, int from) {
    return emulated::from_word<T>(emulated::exchange(emulated::word_of(x))[from % 32]);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int by) {
    return emulated::from_word<T>(emulated::exchange(emulated::word_of(x))[emulated::lane() ^ by]);
}
inline uint32_t __ballot_sync(unsigned, bool x) {
    const uint64_t* const of = emulated::exchange(x ? 1 : 0);
    uint32_t all = 0;
    for (int i = 0; i < 32; i++) all |= static_cast<uint32_t>(of[i]) << i;
    return all;
}
inline int __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline int __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == 0xffffffffu; }
template <class T, class Join>
T emulated_reduce(T x, Join join) {
    const uint64_t* const of = emulated::exchange(emulated::word_of(x));
    T all = emulated::from_word<T>(of[0]);
    for (int i = 1; i < 32; i++) all = join(all, emulated::from_word<T>(of[i]));
    return all;
}
inline int __reduce_max_sync(unsigned, int x) {
    return emulated_reduce(x, [](int a, int b) { return std::max(a, b); });
}
inline int __reduce_min_sync(unsigned, int x) {
    return emulated_reduce(x, [](int a, int b) { return std::min(a, b); });
}
inline uint32_t __reduce_add_sync(unsigned, uint32_t x) {
    return emulated_reduce(x, [](uint32_t a, uint32_t b) { return a + b; });
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t x) {
    return emulated_reduce(x, [](uint32_t a, uint32_t b) { return a | b; });
}
inline uint32_t __reduce_and_sync(unsigned, uint32_t x) {
    return emulated_reduce(x, [](uint32_t a, uint32_t b) { return a & b; });
}

template <class T>
T __ldg(const T* at) {
    return *at;
}
template <class T>
T __ldcg(const T* at) {
    return *at;
}
template <class T>
T __ldcs(const T* at) {
    return *at;
}
template <class T>
void __stcs(T* at, T x) {
    *at = x;
}

// Returns what was there.
template <class T, class Change>
T emulated_change(T* at, Change change) {
    emulated::lock();
    const T before = *at;
    *at = change(before);
    emulated::unlock();
    return before;
}
inline uint32_t atomicAdd(uint32_t* at, uint32_t x) {
    return emulated_change(at, [&](uint32_t y) { return y + x; });
}
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long x) {
    return emulated_change(at, [&](unsigned long long y) { return y + x; });
}
inline uint32_t atomicInc(uint32_t* at, uint32_t last) {
    return emulated_change(at, [&](uint32_t y) { return y >= last ? 0 : y + 1; });
}
inline int atomicMax(int* at, int x) {
    return emulated_change(at, [&](int y) { return std::max(x, y); });
}
inline int atomicMin(int* at, int x) {
    return emulated_change(at, [&](int y) { return std::min(x, y); });
}
template <class T>
T atomicOr(T* at, T x) {
    return emulated_change(at, [&](T y) { return y | x; });
}

using std::max;
using std::min;
inline int max(int a, uint32_t b) { return std::max(a, static_cast<int>(b)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selection) {
    const uint64_t both = a | uint64_t{b} << 32;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) out |= static_cast<uint32_t>(both >> 8 * (selection >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}
inline uint32_t __float_as_uint(float x) { return emulated::from_word<uint32_t>(emulated::word_of(x)); }
inline int __float_as_int(float x) { return emulated::from_word<int>(emulated::word_of(x)); }
inline float __uint_as_float(uint32_t x) { return emulated::from_word<float>(x); }
inline float __int_as_float(int x) { return emulated::from_word<float>(emulated::word_of(x)); }
inline void __sincosf(float x, float* sine, float* cosine) {
    *sine = std::sin(x);
    *cosine = std::cos(x);
}
inline float __fadd_rz(float x, float y) {
    const double exact = double{x} + y;
    const auto nearest = static_cast<float>(exact);
    return std::abs(nearest) > std::abs(exact) ? std::nextafter(nearest, 0.0f) : nearest;
}
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline size_t __cvta_generic_to_shared(const void* at) { return emulated::address_of(at); }
