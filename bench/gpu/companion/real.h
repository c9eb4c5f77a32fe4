// The CUDA runtime's own functions, behind those that hooks.cpp puts before them.
#pragma once

#include <cuda_runtime_api.h>

namespace consumer {

struct Runtime {
    decltype(&::cudaGetDeviceProperties) cudaGetDeviceProperties;
    decltype(&::cudaDeviceGetAttribute) cudaDeviceGetAttribute;
    decltype(&::cudaFuncSetAttribute) cudaFuncSetAttribute;
    decltype(&::cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
        cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags;
    decltype(&::cudaStreamCreateWithPriority) cudaStreamCreateWithPriority;
};

const Runtime& real_runtime();

}  // namespace consumer
