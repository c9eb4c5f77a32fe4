// Latents beside full rows of exact windows: one softmax over both.
#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

// Latents beside full rows of exact windows.
void beside() {
    int n_shared = 0;  // kernels on multiprocessors of their own
    for (const int held : {0, 10}) {
        for (const auto& [full, latents] : shapes_beside()) {
            const Beside c{AttnCase(full), AttnCase(latents)};
            DeviceCase of_full(c.full.params);
            DeviceCase of_latents(c.latents.params, device_limits(), false, held);
            of_latents.keeps_parts = true;
            const std::vector<float> got = of_latents.run_beside(of_full);
            const double error = relative_error(got, c.oracle());
            const double tolerance = tolerance_of(latents);
            CHECK_MSG(error <= tolerance,
                      full.name + " (" + of_latents.args.kernel->name + "): relative error " + std::to_string(error));
            if (latents.n_past > 0) CHECK_MSG(relative_error(got, c.oracle(Perturb::score)) > tolerance, full.name);
            n_shared += of_latents.args.sharing.parts > 0 ? 1 : 0;
        }
    }
    CHECK_MSG(n_shared == 12, std::to_string(n_shared));
}

// Latents of several sequences beside their exact windows: each, both or neither of them apart.
void apart_beside() {
    const auto shape = [](const char* name, int n_seq, int n_past) {
        AttnShape s;
        s.name = name;
        s.head_dim = 64;
        s.n_kv = 4;
        s.rep = 3;
        s.n_seq = n_seq;
        s.n_past = n_past;
        s.uniform = s.permute = true;
        s.seed = static_cast<unsigned>(2900 + n_seq);
        return s;
    };
    const auto compare = [](const AttnShape& full, const AttnShape& latents, bool windows, bool middle) {
        const Beside c{AttnCase(full), AttnCase(latents)};
        DeviceCase of_full(c.full.params, device_limits(), windows);
        DeviceCase of_latents(c.latents.params, device_limits(), middle);
        CHECK((of_full.args.apart > 0) == windows && (of_latents.args.apart > 0) == middle);
        // more tokens' keys are rebuilt as full rows first
        CHECK((kernel_of(of_latents) == "expand") == (latents.k_rebuild && latents.n_seq > 3));
        if (full.n_seq == 3 && windows) {
            of_full.args.apart = of_full.args.n_split = 9;
            of_full.args.least_tiles = 1;
        }
        of_latents.keeps_parts = true;
        const std::vector<float> got = of_latents.run_beside(of_full);
        const double error = relative_error(got, c.oracle());
        CHECK_MSG(error <= tolerance_of(latents), latents.name + ": relative error " + std::to_string(error));
        CHECK_MSG(relative_error(got, c.oracle(Perturb::score)) > tolerance_of(latents), latents.name);
    };
    for (const int n_seq : {3, 20}) {
        AttnShape full = shape("windows apart", n_seq, 60 + 7 * n_seq);  // the last is shortest
        AttnShape latents = shape("latents apart", n_seq, 90 + 7 * n_seq);
        full.k_formats = full.v_formats = {Format::f16, Format::f16};
        full.region_tokens = {4, 20};
        latents.k_group = latents.v_group = 4;
        latents.k_ranks = latents.v_ranks = {192};
        latents.v_latent = true;
        latents.k_formats = latents.v_formats = {Format::q4};
        for (const bool windows : {true, false}) {
            for (const bool middle : {true, false}) compare(full, latents, windows, middle);
        }
        latents.name = "rebuilt keys beside windows apart";
        latents.k_rebuild = true;
        for (const bool windows : {true, false}) compare(full, latents, windows, false);
    }
}

}  // namespace

Cases beside_cases() { return {{"beside", beside}, {"apart_beside", apart_beside}}; }

}  // namespace lkv::test
