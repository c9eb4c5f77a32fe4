// The GPUs of a build with CUDA.
#include <cuda_runtime_api.h>

#include "devices/gpus.h"
#include "devices/inherited.h"
#include "ggml-cuda.h"

namespace lkv {

int count_gpus(std::string& why) {
    cuda::refuse_inherited();
    int n = 0;
    const cudaError_t error = cudaGetDeviceCount(&n);
    if (error != cudaSuccess) n = 0;
    if (n == 0) why = error == cudaSuccess ? "no device" : cudaGetErrorString(error);
    return n;
}

bool built_for_gpus() { return true; }

GpuBytes gpu_bytes(int gpu) {
    GpuBytes bytes{};
    ggml_backend_cuda_get_device_memory(gpu, &bytes.free, &bytes.total);
    return bytes;
}

ggml_backend_buffer_type_t gpu_memory(int gpu) { return ggml_backend_cuda_buffer_type(gpu); }

bool gpu_has_warpgroups(int gpu) {
    int major = 0;
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu) == cudaSuccess && major == 9;
}

}  // namespace lkv
