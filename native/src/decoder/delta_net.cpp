#include "decoder/delta_net.h"

#include "base/error.h"
#include "decoder/number.h"

namespace lkv {

DeltaNetSizes read_delta_net(const GgufFile& file, const std::string& architecture) {
    const std::string dot = architecture + ".ssm.";
    const auto need = [&](const char* name, int64_t low, int64_t high) {
        return number_within(file, dot + name, low, high);
    };
    DeltaNetSizes sizes;
    sizes.d_conv = need("conv_kernel", 2, 16);
    sizes.head_dim = need("state_size", 1, 1024);
    sizes.n_k_heads = need("group_count", 1, 1024);
    sizes.n_v_heads = need("time_step_rank", 1, 1024);
    if (sizes.n_v_heads % sizes.n_k_heads != 0) {
        fail(dot + "time_step_rank", "expected a multiple of the key heads ", sizes.n_k_heads, "; got ",
             sizes.n_v_heads);
    }
    if (const int64_t inner = file.get_u32(dot + "inner_size"); inner != sizes.value_width()) {
        fail(dot + "inner_size", "expected ", sizes.value_width(), ", time_step_rank times state_size; got ", inner);
    }
    return sizes;
}

}  // namespace lkv
