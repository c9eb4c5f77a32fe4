// What the companion runs on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace consumer {

enum class Way {
    prefetch,  // into L2 alone: no multiprocessor takes the bytes, so a few of them ask for all that memory has
    load,      // into shared memory
};

// Blocks that each fill a multiprocessor's shared memory, and so keep everything else away from it, read `buffer`.
struct Reading {
    const char* buffer;
    size_t bytes;
    int blocks;
    Way way;
    double bytes_per_second;   // of all blocks together; 0: as many as they can
    int64_t ns;                // how long
    uint64_t first;            // chunk to begin with
    unsigned long long* read;  // bytes read are added here
};

cudaError_t prepare();
cudaError_t read_memory(const Reading& reading, cudaStream_t stream);

// Copies n bytes, a multiple of 16.
cudaError_t copy_memory(const void* from, void* to, size_t n, cudaStream_t stream);

// Small thread blocks, which wait for a while, count in seen[%smid] where they ran.
cudaError_t visit_multiprocessors(unsigned* seen, int blocks, cudaStream_t stream);

}  // namespace consumer
