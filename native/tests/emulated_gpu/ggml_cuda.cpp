// What the executor asks ggml-cuda for, of ggml's CPU: a session on the emulated GPU runs our kernels there and all other nodes here. The
// emulated GPU's memory is the host's.
#include "ggml-cuda.h"

#include "ggml-cpu.h"
#include "runtime/cuda/ggml_stream.h"

ggml_backend_t ggml_backend_cuda_init(int) { return ggml_backend_cpu_init(); }

ggml_backend_buffer_type_t ggml_backend_cuda_buffer_type(int) { return ggml_backend_cpu_buffer_type(); }

namespace lkv::cuda {

cudaStream_t stream_of(ggml_backend_t) { return nullptr; }
cudaError_t give_priority(ggml_backend_t) { return cudaSuccess; }
bool waits(const ggml_tensor*) { return false; }

}  // namespace lkv::cuda
