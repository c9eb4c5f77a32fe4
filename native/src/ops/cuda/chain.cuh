// Kernels that start while the one before still runs (programmatic dependent launch, compute capability 9.0): what does not
// depend on it, tables and thread block set-up, is done by the time it ends. Without it every kernel waits for the last one.
#pragma once

#include <cuda_runtime_api.h>

namespace lkv::cuda {

// Everything that earlier kernels wrote is there. Every kernel launched by `launch_next` calls it, in all its threads.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

// The next kernel may be set up now.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

inline bool device_chains() {
    static const bool chains = [] {
        int device = 0;
        int major = 0;
        return cudaGetDevice(&device) == cudaSuccess &&
               cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
    }();
    return chains;
}

template <class... Params>
cudaError_t launch_next(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                        const Params&... params) {
    if (shared_bytes > 48 * 1024) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
        if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = device_chains() ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace lkv::cuda
