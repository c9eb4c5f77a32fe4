// What the companion runs on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace consumer {

// Blocks that each fill a multiprocessor's shared memory, and so keep everything else away from it, load `buffer`. (What asks for more at a
// time, as 16 bytes in every 256, adds or stores, left a copy no less and programs far less: answers took five times as long.)
struct Reading {
    char* buffer;
    size_t bytes;  // a power of two
    int blocks;
    double bytes_per_second;   // of all blocks together; 0: as many as they can
    int64_t ns;                // how long
    uint64_t first;            // chunk to begin with
    unsigned long long* read;  // bytes asked for are added here
};

cudaError_t prepare();
cudaError_t read_memory(const Reading& reading, cudaStream_t stream);

// Copies n bytes, a multiple of 16, or reads them only where `to` is null. light: so many thread blocks with 16 KB in
// flight each, one a multiprocessor, which is what matrix products with one token and attention have.
cudaError_t copy_memory(const void* from, void* to, size_t n, int light, cudaStream_t stream);

// ticked[0] cycles of a multiprocessor's clock in ticked[1] ns.
cudaError_t count_cycles(int64_t* ticked, cudaStream_t stream);

// Small thread blocks, which wait for a while, count in seen[%smid] where they ran.
cudaError_t visit_multiprocessors(unsigned* seen, int blocks, cudaStream_t stream);

}  // namespace consumer
