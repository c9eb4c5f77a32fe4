#pragma once

#include <cuda_runtime_api.h>

#include "ggml-backend.h"

namespace lkv::cuda {

// backend: one that ggml_backend_cuda_init made.
cudaStream_t stream_of(ggml_backend_t backend);

// Before the backend's first work: its stream becomes one of the highest priority.
cudaError_t give_priority(ggml_backend_t backend);

// From now on cuBLAS multiplies f32 numbers as they are: ggml-cuda lets it round both to the 10 bits of TF32.
void multiply_in_f32(ggml_backend_t backend);

// Whether ggml-cuda waits for the GPU while it enqueues this product of experts: a graph with such a node cannot be recorded.
bool waits(const ggml_tensor* node);

}  // namespace lkv::cuda
