// What needs ggml-cuda's private header: the stream its backend works on.
#include "runtime/cuda/ggml_stream.h"

#include "ggml-backend-impl.h"
#include "ggml-cuda/common.cuh"

namespace lkv::cuda {

cudaStream_t stream_of(ggml_backend_t backend) {
    return static_cast<ggml_backend_cuda_context*>(backend->context)->stream();
}

cudaError_t give_priority(ggml_backend_t backend) {
    auto& context = *static_cast<ggml_backend_cuda_context*>(backend->context);
    cudaStream_t& stream = context.streams[context.device][context.curr_stream_no];
    if (stream != nullptr) return cudaErrorInvalidValue;
    int lowest = 0;
    int highest = 0;
    cudaError_t error = cudaSetDevice(context.device);
    if (error == cudaSuccess) error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    // the backend destroys it
    return error == cudaSuccess ? cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest) : error;
}

}  // namespace lkv::cuda
