// The GPUs of this machine: how many there are, and their memory. One implementation in a CUDA build (cuda_gpus.cpp), one without
// (no_gpus.cpp).
#pragma once

#include <cstddef>
#include <string>

#include "ggml-backend.h"

namespace lkv {

// The number of GPUs that this build can use. why: the reason if there is none. A build with CUDA starts CUDA here; no child of fork()
// can use it after that. Errors: Error in such a child.
int count_gpus(std::string& why);
// Whether count_gpus() looks for any.
bool built_for_gpus();

struct GpuBytes {
    size_t free;
    size_t total;
};
GpuBytes gpu_bytes(int gpu);
// Free memory that nobody plans to take, on a GPU or on the host: for CUDA and cuBLAS themselves, and other programs.
constexpr size_t left_alone = size_t{1} << 30;

ggml_backend_buffer_type_t gpu_memory(int gpu);

// Whether it multiplies by warpgroups: compute capability 9.0.
bool gpu_has_warpgroups(int gpu);

}  // namespace lkv
