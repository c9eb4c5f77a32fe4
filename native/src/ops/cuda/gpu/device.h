// The device that plans are made for.
#pragma once

#include <cuda_runtime_api.h>

namespace lkv::cuda {

// What a plan depends on.
struct Device {
    int n_multiprocessors;
    int shared_bytes;  // that a thread block may have
    bool warpgroups;   // products by warpgroups: compute capability 9.0 and machine code for it
};

// The current device, with what this build has for it.
cudaError_t describe_device(Device& device);

// Threads of a thread block, for kernels that have no number of their own.
constexpr int n_threads = 256;
constexpr int n_warps = n_threads / 32;

}  // namespace lkv::cuda
