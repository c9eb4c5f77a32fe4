#include "ops/cuda/gpu/device.h"

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/gpu/warpgroup.cuh"

namespace lkv::cuda {

namespace {

// Has shared memory only in machine code for compute capability 9.0 itself.
__global__ void warpgroup_probe(int* out) {
    if constexpr (has_warpgroup_products) {
        __shared__ int probe;
        if (threadIdx.x == 0) probe = *out;
        __syncthreads();
        *out = probe + 1;
    }
}

}  // namespace

cudaError_t describe_device(Device& device) {
    int id = 0;
    cudaError_t error = cudaGetDevice(&id);
    const auto ask = [&](int& value, cudaDeviceAttr attribute) {
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, id);
    };
    ask(device.n_multiprocessors, cudaDevAttrMultiProcessorCount);
    ask(device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if (error != cudaSuccess) return error;
    device.warpgroups = compiled(warpgroup_probe).sharedSizeBytes > 0;
    return cudaSuccess;
}

}  // namespace lkv::cuda
