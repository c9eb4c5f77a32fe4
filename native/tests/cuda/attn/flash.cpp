// Many query rows on full f16 rows, by warpgroups: kernels/flash.
#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

// Many query rows on full f16 rows by warpgroups: a tile, several, parts of them, tiles that no row or not every row sees, free slots that
// hold NaN; and latents expanded for them, chunk by chunk behind exact windows.
void flash() {
    unsigned seed = 500;
    const auto check = [&](AttnShape s, const char* name) {
        s.name = std::string("flash, ") + name;
        s.seed = seed++;
        if (device_limits().warpgroups) {
            CHECK_MSG(kernel_of(DeviceCase(AttnCase(s).params)) == "flash", s.name + ": another kernel");
        }
        compare(s);
    };
    AttnShape s;
    s.head_dim = 128;
    s.rep = 4;
    s.n_past = 300;
    s.n_tokens = 70;
    check(s, "grouped queries");
    s.alibi = true;
    check(s, "ALiBi");
    s.alibi = false;
    s.window = 77;
    check(s, "a sliding window");
    s.permute = true;
    s.window = 0;
    s.n_past = 100;
    s.n_seq = 3;
    s.n_tokens = 20;
    check(s, "holes and three sequences");
    s.permute = false;
    s.n_past = 150;
    check(s, "tiles of other sequences");
    s.n_tokens = 4;
    check(s, "steps of three sequences");
    s = {};
    s.n_tokens = 140;
    check(s, "heads of 64");
    s.k_formats = s.v_formats = {Format::f16, Format::f16, Format::f16};
    s.head_dim = 128;
    s.rep = 2;
    check(s, "three regions");
    s.empty_first = true;
    check(s, "no first region");
    s = {};
    s.head_dim = 256;
    s.rep = 4;
    s.n_past = 300;
    s.n_tokens = 70;
    check(s, "heads of 256");
    s.window = 77;
    check(s, "heads of 256 and a sliding window");
    s.window = 0;
    s.permute = true;
    s.n_past = 100;
    s.n_seq = 3;
    s.n_tokens = 20;
    check(s, "heads of 256, holes and three sequences");
    s = {};
    s.head_dim = 256;
    s.n_tokens = 140;
    s.k_formats = s.v_formats = {Format::f16, Format::f16, Format::f16};
    check(s, "heads of 256 and three regions");

    for (const auto& [full, latents] : shapes_beside()) {
        if (latents.n_past == 0 || latents.n_tokens < 9) continue;
        const Beside c{AttnCase(full), AttnCase(latents)};
        DeviceCase of_full(c.full.params);
        DeviceCase of_latents(c.latents.params);
        if (of_latents.args.chunk == 0) continue;
        of_latents.args.chunk = cuda::chunk_step;
        const double error = relative_error(of_latents.run_beside(of_full), c.oracle());
        CHECK_MSG(error <= tolerance_of(latents), full.name + ", in chunks: relative error " + std::to_string(error));
    }
}

}  // namespace

Cases flash_cases() { return {{"flash", flash}}; }

}  // namespace lkv::test
