// A build without a GPU.
#include "base/error.h"
#include "runtime/gpu.h"

namespace lkv {

std::unique_ptr<Gpu> open_gpu(int) { fail("gpu", "expected a build with -DLATENTKV_CUDA=ON; got a CPU build"); }

}  // namespace lkv
