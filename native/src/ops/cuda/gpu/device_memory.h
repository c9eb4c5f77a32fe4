// Device memory and pinned memory of the host, which free themselves, and CUDA errors as Error.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>
#include <vector>

#include "base/error.h"
#include "devices/inherited.h"

namespace lkv::cuda {

inline void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        fail("cuda", "expected ", what, " to succeed; got ", cudaGetErrorString(error));
    }
}

// Why an allocation failed. The runtime keeps the error for whoever asks for the last one next, which would be a kernel's launch in a
// session that is fine.
inline const char* allocation_error(cudaError_t error) {
    cudaGetLastError();
    return cudaGetErrorString(error);
}

// What this thread allocates and launches from now on is the device's. Nothing puts it back: setting a device begins a context on it.
inline int enter(int device) {
    refuse_inherited();
    check(cudaSetDevice(device), "a GPU");
    return device;
}

// What was copied or set without a stream is in place. cudaMemcpy of pageable memory returns when it is staged and cudaMemset at once;
// streams of ggml-cuda do not wait for either. Without this, beside another program on the GPU, rows were moved by lists that had not arrived.
inline void settle(const char* what) { check(cudaStreamSynchronize(nullptr), what); }

class DeviceMemory {
public:
    DeviceMemory() = default;
    explicit DeviceMemory(size_t bytes) : bytes_(bytes) {
        const cudaError_t error = cudaMalloc(&data_, bytes == 0 ? 16 : bytes);
        if (error != cudaSuccess) {
            fail("memory", "expected ", bytes >> 20, " MiB on the GPU; got ", allocation_error(error),
                 "; lower -c / n_ctx or choose a smaller --kv");
        }
    }
    DeviceMemory(DeviceMemory&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    DeviceMemory& operator=(DeviceMemory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    ~DeviceMemory() { cudaFree(data_); }

    template <class T>
    static DeviceMemory of(const std::vector<T>& host) {
        DeviceMemory memory(host.size() * sizeof(T));
        check(cudaMemcpy(memory.data_, host.data(), memory.bytes_, cudaMemcpyHostToDevice), "a copy to the GPU");
        settle("a copy to the GPU");
        return memory;
    }

    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }
    size_t bytes() const { return bytes_; }

private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

// Pinned memory of the host: copies to and from it do not stall the stream.
class PinnedMemory {
public:
    explicit PinnedMemory(size_t bytes) {
        const cudaError_t error = cudaMallocHost(&data_, bytes);
        if (error != cudaSuccess) {
            fail("memory", "expected ", bytes >> 10, " KiB of pinned memory; got ", allocation_error(error),
                 "; lower -ub / n_ubatch");
        }
    }
    PinnedMemory(const PinnedMemory&) = delete;
    PinnedMemory& operator=(const PinnedMemory&) = delete;
    ~PinnedMemory() { cudaFreeHost(data_); }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
};

}  // namespace lkv::cuda
