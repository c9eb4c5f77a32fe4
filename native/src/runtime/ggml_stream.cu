// The one line that needs ggml-cuda's private header: the stream its backend works on.
#include "runtime/ggml_stream.h"

#include "ggml-backend-impl.h"
#include "ggml-cuda/common.cuh"

namespace lkv::cuda {

cudaStream_t stream_of(ggml_backend_t backend) {
    return static_cast<ggml_backend_cuda_context*>(backend->context)->stream();
}

}  // namespace lkv::cuda
