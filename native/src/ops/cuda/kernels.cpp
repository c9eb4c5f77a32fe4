#include "ops/cuda/kernel.h"

// The first that takes a problem runs it.
#define LKV_KERNELS(X) \
    X(mla)             \
    X(decode)          \
    X(expand_keys)     \
    X(wide)            \
    X(expand)          \
    X(flash)           \
    X(prefill)         \
    X(direct)

namespace lkv::cuda {

namespace kernels {
#define X(name) extern const Kernel name;
LKV_KERNELS(X)
#undef X
}  // namespace kernels

const std::vector<const Kernel*>& all_kernels() {
#define X(name) &kernels::name,
    static const std::vector<const Kernel*> all = {LKV_KERNELS(X)};
#undef X
    return all;
}

}  // namespace lkv::cuda
