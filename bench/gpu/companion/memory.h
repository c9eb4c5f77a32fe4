// What the companion runs on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace consumer {

// How readers keep memory busy. Between programs it goes by what each has in flight, so few multiprocessors must ask for much.
// On an H200, what 64 of 132 leave to a copy: gather 1.4 TB/s, load 1.5; adds and stores to a word in every 64 bytes 1.6.
enum class Way {
    gather,  // loads 16 bytes in every 256, all of which L2 is asked to fetch
    load,    // loads whole chunks into shared memory
};
constexpr Way ways[] = {Way::gather, Way::load};
const char* name_of(Way way);

// Blocks that each fill a multiprocessor's shared memory, and so keep everything else away from it, read `buffer`.
struct Reading {
    char* buffer;
    size_t bytes;  // a power of two
    int blocks;
    Way way;
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

// Small thread blocks, which wait for a while, count in seen[%smid] where they ran.
cudaError_t visit_multiprocessors(unsigned* seen, int blocks, cudaStream_t stream);

}  // namespace consumer
