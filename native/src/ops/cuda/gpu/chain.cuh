// Kernels that start while the one before still runs (programmatic dependent launch, compute capability 9.0): what does not
// depend on it, tables and thread block set-up, is done by the time it ends. Without it every kernel waits for the last one.
#pragma once

#include <cuda_runtime_api.h>

namespace lkv::cuda {

// Everything that earlier kernels wrote is there. Every kernel launched by `launch_next` calls it in at least one thread block, so that it
// does not end before them, and in all threads before what an earlier kernel touches is read or written.
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

// Whether this build's kernels wait on this device, and form clusters: code of an older architecture, translated for it, does neither.
bool device_chains();

// cluster: thread blocks that run at the same time and see each other's shared memory (compute capability 9.0).
template <class... Params>
cudaError_t launch_clusters(dim3 cluster, void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
                            cudaStream_t stream, const Params&... params) {
    // without asking, 48 KiB with a kernel's own variables, which may be up to 8
    if (shared_bytes > 40 * 1024) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
        if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute attributes[2] = {};
    unsigned n_attributes = 0;
    if (device_chains()) {
        attributes[n_attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[n_attributes++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster.x * cluster.y * cluster.z > 1) {
        attributes[n_attributes].id = cudaLaunchAttributeClusterDimension;
        attributes[n_attributes].val.clusterDim.x = cluster.x;
        attributes[n_attributes].val.clusterDim.y = cluster.y;
        attributes[n_attributes++].val.clusterDim.z = cluster.z;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = n_attributes;
    return cudaLaunchKernelEx(&config, kernel, params...);
}

// What this build has of a kernel for this device: nothing but zeros where there is no code for it.
template <class... Params>
cudaFuncAttributes compiled(void (*kernel)(Params...)) {
    cudaFuncAttributes of{};
    if (cudaFuncGetAttributes(&of, kernel) == cudaSuccess) return of;
    cudaGetLastError();  // not the next caller's
    return {};
}

template <class... Params>
cudaError_t launch_next(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                        const Params&... params) {
    return launch_clusters(dim3(1), kernel, grid, threads, shared_bytes, stream, params...);
}

}  // namespace lkv::cuda
