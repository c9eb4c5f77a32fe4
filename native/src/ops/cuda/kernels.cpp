#include "ops/cuda/kernel.h"

namespace lkv::cuda {

namespace kernels {
extern const Kernel specialized, mla, decode, expand_keys, wide, expand, prefill, direct;
}

const std::vector<const Kernel*>& all_kernels() {
    static const std::vector<const Kernel*> all = {
        &kernels::specialized, &kernels::mla,    &kernels::decode,  &kernels::expand_keys,
        &kernels::wide,        &kernels::expand, &kernels::prefill, &kernels::direct,
    };
    return all;
}

}  // namespace lkv::cuda
