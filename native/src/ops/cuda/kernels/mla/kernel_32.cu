#include "ops/cuda/kernels/mla/launch.cuh"

template cudaError_t lkv::cuda::launch_mla_rows<4>(const MlaArgs& args, int items, cudaStream_t stream);
