#include "ops/cuda/gpu/chain.cuh"

namespace lkv::cuda {

namespace {

// Compiled for the architectures of all others.
__global__ void probe_kernel() {}

}  // namespace

bool device_chains() {
    static const bool chains = compiled(probe_kernel).ptxVersion >= 90;
    return chains;
}

}  // namespace lkv::cuda
