// A build without a GPU.
#include "base/error.h"
#include "runtime/gpu.h"

namespace lkv {

ggml_backend_buffer_type_t gpu_memory(std::string& why) {
    why = "not built, needs -DLATENTKV_CUDA=ON";
    return nullptr;
}

std::unique_ptr<Gpu> open_gpu() { fail("gpu", "expected a build with -DLATENTKV_CUDA=ON; got a CPU build"); }

}  // namespace lkv
