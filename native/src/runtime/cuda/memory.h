// Memory of a session on the GPU that is not a kernel's: the cache's rows, and the host's pinned memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "cache/storage.h"
#include "ops/cuda/gpu/device_memory.h"

namespace lkv::cuda {

class DeviceStorage : public CacheStorage {
public:
    // device: the current one
    DeviceStorage(size_t bytes, int device, cudaStream_t stream) : device_(device), memory_(bytes), stream_(stream) {
        check(cudaMemset(memory_.as<void>(), 0, bytes), "clearing the cache");
        settle("clearing the cache");
    }
    DeviceStorage(const DeviceStorage&) = delete;
    DeviceStorage& operator=(const DeviceStorage&) = delete;
    ~DeviceStorage() override { cudaSetDevice(device_); }
    uint8_t* at(size_t offset) const override { return memory_.as<uint8_t>() + offset; }
    void read(std::span<const ByteRange> ranges, uint8_t* to) const override {
        enter(device_);
        check(cudaStreamSynchronize(stream_), "the stream");
        for (const ByteRange& of : ranges) {
            check(cudaMemcpyAsync(to + of.begin, at(of.begin), of.bytes(), cudaMemcpyDeviceToHost, stream_),
                  "a copy of the cache");
        }
        check(cudaStreamSynchronize(stream_), "a copy of the cache");
    }
    void write(std::span<const ByteRange> ranges, const uint8_t* from) override {
        enter(device_);
        for (const ByteRange& of : ranges) {
            check(cudaMemcpyAsync(at(of.begin), from + of.begin, of.bytes(), cudaMemcpyHostToDevice, stream_),
                  "a copy to the cache");
        }
        check(cudaStreamSynchronize(stream_), "a copy to the cache");
    }

private:
    int device_;
    DeviceMemory memory_;
    cudaStream_t stream_;
};

// Pinned host memory, so that copies do not stall the stream.
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
