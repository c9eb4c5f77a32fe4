// What needs ggml-cuda's private headers: the stream its backend works on, and which products wait.
#include "runtime/cuda/ggml/stream.h"

#include "ggml-backend-impl.h"
#include "ggml-cuda/common.cuh"
#include "ggml-cuda/mmf.cuh"
#include "ggml-cuda/mmq.cuh"
#include "ggml-cuda/mmvq.cuh"

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

void multiply_in_f32(ggml_backend_t backend) {
    auto& context = *static_cast<ggml_backend_cuda_context*>(backend->context);
    CUBLAS_CHECK(cublasSetMathMode(context.cublas_handle(), CUBLAS_DEFAULT_MATH));
}

// As ggml_cuda_mul_mat_id decides: by kernels for few tokens, by quantized ones, by ones in floating point, else expert by expert once
// the host knows which token goes where.
bool waits(const ggml_tensor* node) {
    if (node->op != GGML_OP_MUL_MAT_ID) return false;
    const ggml_tensor* const w = node->src[0];
    const int64_t n_tokens = node->ne[2];
    const int cc = ggml_cuda_info().devices[ggml_cuda_get_device()].cc;
    if (ggml_is_quantized(w->type) && n_tokens <= MMVQ_MAX_BATCH_SIZE &&
        n_tokens <= get_mmvq_mmid_max_batch(w->type, cc)) {
        return false;
    }
    if (ggml_cuda_should_use_mmq(w->type, cc, n_tokens, w->ne[2])) return false;
    return !ggml_cuda_should_use_mmf(w->type, cc, WARP_SIZE, w->ne, w->nb, static_cast<int>(n_tokens), true);
}

}  // namespace lkv::cuda
