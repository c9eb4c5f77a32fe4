// Latents that become full rows or keys first: kernels/expand.
#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

void expand_samples() {
    compare_samples({
        {"expand", 2, 13, 1, 0, 0, false, Format::q8_0, 40, 40},
        {"expand", 1, 13, 1, 0, 0, false, Format::q4_0, 40, 140, 3},
        {"expand keys", 4, 4, 4, 320, 384, true, Format::n3},
        {"expand", 1, 13, 1, 0, 0, false, Format::n4, 40, 40},
        {"expand", 2, 4, 1, 64, 64, true, Format::n2, 70, 270},
        {"expand keys", 4, 4, 4, 320, 384, true, Format::q4},
        {"expand keys", 8, 3, 8, 512, 320, true, Format::q8, 2, 300},
        {"expand keys", 2, 4, 2, 192, 128, true, Format::q2, 5, 500},
        {"expand keys", 4, 2, 4, 288, 128, true, Format::f16},
        {"expand", 2, 4, 1, 64, 64, true, Format::q4, 9, 40},
        {"expand", 1, 4, 1, 64, 64, true, Format::q8, 70, 270},
        {"expand", 2, 4, 2, 208, 240, true, Format::q4, 9, 140},  // ranks that are no whole units
    });
}

// Chunks of expanded keys add up in the same parts, however many of these each would choose for itself: 8 steps of 32 slots in 7 parts
// are four times two, the 5 steps behind them five.
void uneven_chunks() {
    AttnShape s = one_latent("expanded keys in uneven chunks", 4, 320, 256, 405);
    s.k_rebuild = true;
    AttnCase c(s);
    DeviceCase device(c.params);
    CHECK(kernel_of(device) == "expand keys");
    device.args.chunk = 256;
    device.args.n_split = 7;
    const double error = relative_error(device.run(), c.oracle());
    CHECK_MSG(error <= tolerance_of(s), s.name + ": relative error " + std::to_string(error));
}

// Prefill that expands chunks of the context: what a chunk takes along of positions, sequences, regions and formats.
void expanded() {
    unsigned seed = 300;
    for (const char* const what : {"three regions", "three sequences", "window", "ALiBi", "bias and norm", "full V",
                                   "no RoPE", "wide latents", "partial rotation", "wide heads"}) {
        if (what == std::string("wide heads") && !device_limits().warpgroups) continue;
        const std::string name = what;
        for (const Format f : {Format::f16, Format::q4, Format::q3}) {
            AttnShape s;
            s.name = "expanded, " + name + ", " + format_name(f);
            s.head_dim = seed % 2 == 0 ? 128 : 80;
            s.n_kv = 4;
            s.rep = 4;
            s.k_rebuild = true;
            s.v_latent = name != "full V";
            s.k_group = 2;
            s.v_group = s.v_latent ? 4 : 1;
            s.k_ranks = {96, 160};
            if (name == "wide latents") {
                s.k_group = 4;
                s.k_ranks = {1040};
            }
            if (name == "wide heads") {
                s.head_dim = 256;
                s.k_ranks = {288, 384};
            }
            if (s.v_latent) s.v_ranks = {name == "wide latents" ? 672 : 208};
            s.k_formats = s.v_formats = {f};
            if (name == "three regions") {
                s.k_formats = s.v_formats = {Format::f16, Format::q8, f};
                s.dropped = 32;
            }
            s.n_seq = name == "three sequences" ? 3 : 1;
            s.window = name == "window" ? 77 : 0;
            s.alibi = name == "ALiBi";
            s.rope = name != "no RoPE" && name != "wide heads";
            s.n_rot = name == "partial rotation" ? 32 : 0;
            s.bias = s.norm = name == "bias and norm";
            s.neox = seed % 3 != 0;
            s.permute = seed % 4 != 0;
            s.n_past = 300;
            s.n_tokens = 64;
            s.seed = seed++;
            CHECK(DeviceCase(AttnCase(s).params).args.chunk != 0);
            compare(s);
            if (f == Format::q3 || !s.v_latent || s.head_dim > 128) continue;
            s.name += ", few rows";
            s.n_tokens = seed % 3 == 0 ? 3 : 1;
            s.k_ranks.assign(s.k_ranks.size(), 272);  // wider than what the decode kernels rebuild
            s.v_ranks.assign(s.v_ranks.size(), 224);
            s.uniform = true;
            s.head_dim = seed % 2 == 0 ? 64 : 96;
            CHECK(kernel_of(DeviceCase(AttnCase(s).params)) == "expand keys");
            compare(s);
        }
    }
}

}  // namespace

Cases expand_cases() { return {{"samples", expand_samples}, {"uneven_chunks", uneven_chunks}, {"expanded", expanded}}; }

}  // namespace lkv::test
