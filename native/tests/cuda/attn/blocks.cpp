// K in blocks of tokens, by every kernel that takes it.
#include "attn/attn_matrix.h"
#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

// A case of every format, each on another path.
void blocks_in_short() {
    int i = 0;
    blocks([&](const AttnShape& shape) {
        if (shape.n_tokens == 5 && i++ % 6 == 0) compare(shape);
    });
}

// K in blocks of tokens beside f16 windows, as --kv small, smaller and smallest have it: the decode and the prefill kernel's own code.
void block_kernels() {
    struct Blocks {
        Format k, v;
        int head_dim, n_kv, rep;
        int n_tokens = 1, n_past = 420;
        int n_seq = 1, window = 0;
        bool permute = false, alibi = false, exact = true;  // exact: with windows
    };
    using enum Format;
    constexpr Blocks cases[] = {
        {c4, q4, 128, 2, 4},
        {c4, q6, 64, 3, 2, 1, 420, 3, 0, true},
        {c3, q3, 64, 4, 2, 2, 700, 2, 100, true},
        {c3, q8, 128, 1, 6, 1, 330, 1, 0, false, true},
        {c2, q2, 128, 2, 7, 1, 95, 1, 0, true},
        {c2, q3, 256, 1, 8},
        {c4, q4, 64, 1, 1, 8, 130, 1, 0, false, false, false},
        {c3, q3, 128, 2, 4, 5, 300, 1, 0, true},  // rows of three thread blocks
        {c4, q4, 128, 2, 4, 40, 200},
        {c3, q3, 64, 3, 3, 70, 300, 3, 90, true},
        {c2, q2, 256, 1, 4, 40, 150, 1, 0, true},
        {c4, f16, 64, 2, 3, 1, 300, 2, 0, true},
    };
    for (const Blocks& of : cases) {
        AttnShape s;
        s.head_dim = of.head_dim;
        s.n_kv = of.n_kv;
        s.rep = of.rep;
        s.k_formats = {f16, f16, of.k};
        s.v_formats = {f16, f16, of.v};
        if (!of.exact) {
            s.k_formats = {of.k};
            s.v_formats = {of.v};
        }
        s.region_tokens = {4, 60};
        s.n_tokens = of.n_tokens;
        s.n_past = of.n_past;
        s.n_seq = of.n_seq;
        s.window = of.window;
        s.permute = of.permute;
        s.alibi = of.alibi;
        s.seed = static_cast<unsigned>(of.head_dim + of.n_past + of.rep);
        s.name = std::string("blocks of ") + format_name(of.k) + " beside " + format_name(of.v) + ", heads of " +
                 std::to_string(of.head_dim) + ", " + std::to_string(of.n_tokens) + " tokens";
        const AttnCase c(s);
        cuda::Device limits = device_limits();
        const auto check = [&](const char* kernel) {
            DeviceCase device(c.params, limits);
            CHECK_MSG(kernel_of(device) == kernel, s.name + ": planned for " + kernel_of(device));
            const double error = relative_error(device.run(), c.oracle());
            CHECK_MSG(error <= tolerance_of(s), s.name + ", " + kernel + ": relative error " + std::to_string(error));
        };
        const bool few = of.n_tokens * of.n_seq * of.rep <= 32;
        if (limits.warpgroups && !few) check(of.head_dim <= 128 || of.head_dim == 256 ? "expand" : "prefill");
        limits.warpgroups = false;
        check(few ? "decode" : "prefill");
        compare(s);
    }
}

}  // namespace

Cases blocks_cases() {
    return {{"blocks_in_short", blocks_in_short},
            {"block_kernels", block_kernels},
            {"blocks", [] { blocks(compare); }, true}};
}

}  // namespace lkv::test
