// Latents that all heads of a group share, and rows that are keys and values: kernels/mla.
#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

void mla_samples() {
    compare_samples({
        {"mla", 4, 4, 4, 256, 192, false, Format::q4},
        {"mla", 4, 4, 4, 256, 192, false, Format::n4},
        {"mla", 4, 4, 4, 128, 192, false, Format::n6, 1, 300, 1, 1},
        {"mla", 4, 3, 4, 256, 128, false, Format::n3, 2},
        {"mla", 4, 4, 4, 256, 192, false, Format::q4, 3, 300, 1, 2},
        {"mla", 4, 4, 4, 128, 256, false, Format::q2, 8, 200},
        {"mla", 2, 5, 2, 64, 512, false, Format::f16},           // eight thread blocks merge a head's parts
        {"mla", 4, 2, 4, 64, 256, false, Format::q8, 2},         // a head has four rows, of two tokens
        {"mla", 4, 3, 4, 64, 256, false, Format::q8, 1, 12000},  // nearly as many parts as there can be
        // many tiles a part
        {"mla", 4, 4, 4, 256, 192, false, Format::q4, 1, 1010, 1, 1},
        {"mla", 4, 2, 4, 320, 512, false, Format::q1, 4, 700, 1, 1},
        {"mla", 8, 1, 8, 512, 640, false, Format::q2, 1, 1100, 1, 1},
        {"mla", 2, 2, 2, 96, 128, false, Format::f16, 1, 500, 1, 1},
        {"mla", 4, 2, 4, 256, 192, false, Format::q4, 20, 90},
        {"mla", 8, 1, 8, 224, 256, false, Format::n3, 9, 60},
    });
}

// Parts that start late, where another kernel is before them, have less work: 42 steps of 32 slots are 13, 13, 8 and 8.
void late_parts() {
    const AttnShape s = one_latent("parts that start late", 2, 96, 64, 1340);
    const AttnCase c(s);
    cuda::Device limits = device_limits();
    limits.n_multiprocessors = 4;
    DeviceCase device(c.params, limits, false, 2);
    CHECK(kernel_of(device) == "mla" && device.args.n_split == 4);
    const double error = relative_error(device.run(), c.oracle());
    CHECK_MSG(error <= tolerance_of(s), s.name + ": relative error " + std::to_string(error));
}

// Rows of a group that the MLA kernel reads, f16 windows beside them.
struct MlaRows {
    using Row = std::vector<SegmentSpec>;
    const char* name;
    int n_kv, rep, group;
    Row k, v;
    int n_past = 300, n_tokens = 1, n_seq = 1;
    bool windows = true, permute = false;
    int n_split = 0, window = 0;
    bool alibi = false;
};

void compare_mla(const std::vector<MlaRows>& cases, unsigned seed) {
    using enum Format;
    using Row = MlaRows::Row;
    for (const MlaRows& of : cases) {
        AttnShape s;
        s.name = std::string("mla, ") + of.name;
        s.head_dim = 64;
        s.n_kv = of.n_kv;
        s.rep = of.rep;
        s.k_group = s.v_group = of.group;
        const auto width = [](const Row& row) {
            int n = 0;
            for (const SegmentSpec& segment : row) n += segment.width;
            return n;
        };
        s.k_ranks.assign(static_cast<size_t>(of.n_kv / of.group), width(of.k));
        s.v_ranks.assign(static_cast<size_t>(of.n_kv / of.group), width(of.v));
        s.v_latent = true;
        s.k_segments = of.k;
        s.v_segments = of.v;
        s.k_formats = s.v_formats = of.windows ? std::vector{f16, f16, q4} : std::vector{f16};
        s.uniform = true;
        s.n_past = of.n_past;
        s.n_tokens = of.n_tokens;
        s.n_seq = of.n_seq;
        s.permute = of.permute;
        s.window = of.window;
        s.alibi = of.alibi;
        s.seed = seed++;
        const AttnCase c(s);
        DeviceCase device(c.params);
        CHECK_MSG(kernel_of(device) == "mla", s.name + ": planned for " + kernel_of(device));
        if (of.n_split != 0) device.args.n_split = of.n_split;
        const std::vector<float> got = device.run();
        const double error = relative_error(got, c.oracle());
        CHECK_MSG(error <= rounded_tolerance, s.name + ": relative error " + std::to_string(error));
        CHECK_MSG(relative_error(got, c.oracle(Perturb::score)) > rounded_tolerance,
                  s.name + ": scores 1 % off go unseen");
    }
}

// Default plans: K and V in runs of 8, 4, 2 and 1 bits, f16 windows beside them. Every width alone, segments that end within a warp's
// share, groups of several heads, more rows than a thread block has, holes, several sequences, parts of one tile and of many.
void mla() {
    using enum Format;
    const std::vector<MlaRows> cases = {
        {"8 bits", 2, 6, 2, {{q8, 64}}, {{q8, 128}}},
        {"4 bits", 2, 6, 2, {{q4, 64}}, {{q4, 128}}},
        {"2 bits", 2, 6, 2, {{q2, 64}}, {{q2, 128}}},
        {"1 bit", 2, 6, 2, {{q1, 96}}, {{q1, 64}}},
        {"f16", 2, 6, 2, {{f16, 64}}, {{f16, 96}}, 100, 1, 1, false},
        {"four widths",
         4,
         4,
         4,
         {{q8, 32}, {q4, 64}, {q2, 64}, {q1, 96}},
         {{q8, 64}, {q4, 96}, {q2, 32}, {q1, 64}},
         700},
        {"dropped channels", 4, 2, 4, {{q8, 32}, {q4, 32}, {q2, 64}, {none, 64}}, {{q4, 64}, {q1, 96}, {none, 96}}},
        {"segments of 32",
         2,
         8,
         2,
         {{q4, 32}, {q4, 32}, {q2, 32}, {q2, 32}},
         {{q8, 32}, {q4, 32}, {q4, 32}, {q1, 32}, {q1, 32}}},
        {"two groups", 4, 5, 2, {{q8, 32}, {q2, 96}}, {{q4, 64}, {q2, 32}}, 300, 1, 1, true, false, 2},
        {"three tokens, three row blocks", 4, 8, 4, {{q8, 32}, {q4, 96}}, {{q4, 128}, {q2, 64}}, 200, 3},
        {"holes, two sequences",
         4,
         1,
         4,
         {{q8, 64}, {q4, 64}},
         {{q8, 32}, {q4, 64}, {q1, 128}},
         200,
         2,
         2,
         true,
         true,
         3,
         90},
        {"ALiBi, one part", 2, 8, 2, {{q4, 64}, {q2, 64}}, {{q4, 64}, {q2, 64}}, 700, 1, 1, true, true, 1, 0, true},
        {"wide",
         8,
         4,
         8,
         {{q8, 128}, {q4, 256}, {q2, 256}, {q1, 128}},
         {{q8, 64}, {q4, 192}, {q2, 384}, {q1, 384}},
         300,
         1,
         1,
         true,
         false,
         2},
    };
    compare_mla(cases, 900);
}

// The same of rows whose groups have scales: every width in runs of one unit and of several, in K and in V.
void mla_scales() {
    using enum Format;
    const std::vector<MlaRows> cases = {
        {"six widths",
         4,
         4,
         4,
         {{n8, 32}, {n6, 32}, {n4, 64}, {n3, 64}, {n2, 32}, {n1, 96}},
         {{n8, 32}, {n6, 32}, {n4, 64}, {n3, 32}, {n2, 96}, {n1, 64}},
         310},
        {"two units a warp, two sequences with holes, two groups",
         4,
         2,
         2,
         {{n6, 64}, {n3, 96}},
         {{n8, 96}, {n6, 96}, {n4, 96}, {n3, 160}, {n2, 96}, {n1, 64}},
         130,
         2,
         2,
         true,
         true,
         2,
         90},
    };
    compare_mla(cases, 950);
}

void mla_one_row() {
    using enum Format;
    const Segments plan = falling_bits();
    compare_one_rows(
        {
            {"f16", "mla", 20, 64, {whole(f16)}, 1, 300},
            {"f16, several tiles a part", "mla", 4, 64, {whole(f16)}, 1, 300, 1, 2},
            {"f16, two tokens, little shared memory", "mla", 10, 64, {whole(f16)}, 2, 120, 1, 2, true},
            {"q8, little shared memory", "mla", 40, 64, {whole(q8)}, 1, 200, 1, 2, true},
            {"q4, many heads", "mla", 70, 64, {whole(q4)}},
            {"a plan behind exact windows", "mla", 16, 64, {whole(f16), whole(f16), plan}, 1, 400, 1, 2},
            {"a plan, eight tokens", "mla", 5, 64, {plan}, 8, 300, 1, 3},
            {"a plan with scales", "mla", 5, 64, {{{n8, 64}, {n4, 192}, {n3, 64}, {n1, 96}}}, 2, 150, 1, 3},
            {"a plan, three sequences", "mla", 5, 64, {plan}, 1, 150, 3, 4, false, true},
            {"f16, three sequences", "mla", 5, 32, {{{f16, 32}, {f16, 96}}}, 1, 150, 3, 4, false, true},
            {"q8_0", "mla", 20, 64, {whole(q8_0)}, 1, 300, 1, 2},
            {"q4_0 beside f16, two tokens", "mla", 16, 64, {whole(f16), whole(f16), whole(q4_0)}, 2, 200},
            {"q8_0, three sequences", "mla", 4, 64, {whole(q8_0)}, 1, 100, 3, 4, false, true},
        },
        2300);
}

}  // namespace

Cases mla_cases() {
    return {{"samples", mla_samples},
            {"late_parts", late_parts},
            {"mla", mla},
            {"mla_scales", mla_scales},
            {"one_row", mla_one_row}};
}

}  // namespace lkv::test
