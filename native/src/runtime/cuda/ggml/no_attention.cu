// In the place of ggml-cuda's flash attention, whose files are not compiled (cmake/llama_cpp.cmake): attention on a GPU is our own kernels'.
#include "ggml-cuda/fattn.cuh"

void ggml_cuda_flash_attn_ext(ggml_backend_cuda_context&, ggml_tensor*) {
    GGML_ABORT("expected no flash attention of ggml in a graph; got one");
}

bool ggml_cuda_flash_attn_ext_supported(int, const ggml_tensor*) { return false; }

size_t ggml_cuda_flash_attn_ext_get_alloc_size(int, const ggml_tensor* dst) { return ggml_nbytes(dst); }
