// Many query rows by single warps: kernels/prefill.
#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

void prefill_samples() {
    compare_samples({
        {"prefill", 2, 4, 1, 0, 0, false, Format::q8_0, 40, 40, 1, 0, 96},
        {"prefill", 2, 4, 1, 0, 0, false, Format::q4_0, 40, 40, 1, 0, 32},
        {"prefill", 2, 4, 1, 0, 0, false, Format::q4, 40, 40, 1, 0, 80},
        {"prefill", 2, 4, 2, 192, 128, false, Format::f16, 40, 40},
        {"prefill", 8, 1, 8, 768, 832, false, Format::q5, 20, 60},
    });
}

void prefill_one_row() {
    using enum Format;
    const Segments plan = falling_bits();
    compare_one_rows(
        {
            {"f16, a prompt", "prefill", 5, 64, {whole(f16)}, 20, 40},
            {"q8_0, a prompt", "prefill", 5, 64, {whole(q8_0)}, 20, 40},
            {"a plan, a prompt", "prefill", 16, 64, {whole(f16), whole(f16), plan}, 12, 90},
            {"q4, a prompt, little shared memory", "prefill", 8, 64, {whole(q4)}, 20, 60, 1, 0, true},
        },
        2313);
}

// Many rows of several sequences, by the flash kernel and by the prefill kernel.
void many_sequences() {
    AttnShape s;
    s.head_dim = 64;
    s.rep = 6;
    s.n_seq = 6;
    s.n_tokens = 5;
    s.n_past = 150;
    for (const Format format : {Format::f16, Format::q8_0}) {
        for (const bool warpgroups : {true, false}) {
            for (const bool permute : {false, true}) {
                s.name = std::string("many sequences, ") + format_name(format) + (permute ? ", any order" : "");
                s.k_formats = s.v_formats = {format};
                s.uniform = true;
                s.permute = permute;
                cuda::Device limits = device_limits();
                limits.warpgroups = limits.warpgroups && warpgroups;
                const AttnCase c(s);
                DeviceCase device(c.params, limits);
                const std::string kernel = limits.warpgroups && format == Format::f16 ? "flash" : "prefill";
                CHECK_MSG(kernel_of(device) == kernel, s.name + ": planned for " + kernel_of(device));
                device.args.n_split = 2;
                device.args.least_tiles = 1;
                const double error = relative_error(device.run(), c.oracle());
                CHECK_MSG(error <= tolerance_of(s),
                          s.name + ", " + kernel + ": relative error " + std::to_string(error));
            }
        }
    }
}

}  // namespace

Cases prefill_cases() {
    return {{"samples", prefill_samples}, {"one_row", prefill_one_row}, {"many_sequences", many_sequences}};
}

}  // namespace lkv::test
