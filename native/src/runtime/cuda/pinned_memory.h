// Pinned host memory, so that copies do not stall the stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/cuda/gpu/device_memory.h"

namespace lkv::cuda {

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
