// A build without GPUs.
#include "base/error.h"
#include "devices/gpus.h"

namespace lkv {
namespace {

[[noreturn]] void refuse() { fail("gpu", "expected a build with -DLATENTKV_CUDA=ON; got a CPU build"); }

}  // namespace

int count_gpus(std::string& why) {
    why = "not built, needs -DLATENTKV_CUDA=ON";
    return 0;
}

bool built_for_gpus() { return false; }

GpuBytes gpu_bytes(int) { refuse(); }

ggml_backend_buffer_type_t gpu_memory(int) { refuse(); }

bool gpu_has_warpgroups(int) { refuse(); }

}  // namespace lkv
