#include "decoder/mamba2.h"

#include "base/error.h"
#include "decoder/number.h"

namespace lkv {

Mamba2Sizes read_mamba2(const GgufFile& file, const std::string& architecture) {
    const std::string dot = architecture + ".ssm.";
    const auto need = [&](const char* name, int64_t low, int64_t high) {
        return number_within(file, dot + name, low, high);
    };
    Mamba2Sizes sizes;
    sizes.d_conv = need("conv_kernel", 2, 16);
    sizes.d_state = need("state_size", 1, 1024);
    sizes.n_heads = need("time_step_rank", 1, 1024);
    sizes.n_groups = need("group_count", 1, 1024);
    const int inner = need("inner_size", 1, 1 << 20);
    if (inner % sizes.n_heads != 0) {
        fail(dot + "inner_size", "expected a multiple of the heads ", sizes.n_heads, "; got ", inner);
    }
    if (sizes.n_heads % sizes.n_groups != 0) {
        fail(dot + "group_count", "expected a divisor of the heads ", sizes.n_heads, "; got ", sizes.n_groups);
    }
    sizes.head_dim = inner / sizes.n_heads;
    return sizes;
}

}  // namespace lkv
