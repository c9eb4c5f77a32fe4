// The cache's rows on a GPU.
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
    DeviceStorage(size_t bytes, int device, cudaStream_t stream);
    DeviceStorage(const DeviceStorage&) = delete;
    DeviceStorage& operator=(const DeviceStorage&) = delete;
    ~DeviceStorage() override { cudaSetDevice(device_); }
    uint8_t* at(size_t offset) const override { return memory_.as<uint8_t>() + offset; }
    // A few ranges are copied each by itself; many, a sequence's rows among those of others, by way of 16 MiB on the GPU.
    void read(std::span<const ByteRange> ranges, uint8_t* to) const override;
    void write(std::span<const ByteRange> ranges, const uint8_t* from) override;

private:
    int device_;
    DeviceMemory memory_;
    cudaStream_t stream_;
};

}  // namespace lkv::cuda
