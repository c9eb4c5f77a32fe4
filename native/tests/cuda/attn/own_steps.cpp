// Tokens that read their own sequences' slots alone: softmax/own_steps.
#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

// Tokens of several sequences, each of which reads the steps that hold its own: few and many sequences, slots in any order, shared ones,
// sequences that nobody asks about, and one without a token. As many parts as tokens, and more.
void apart() {
    using enum Format;
    struct Batch {
        const char* name;
        int n_kv, rep, group, n_seq, n_past;
        std::vector<int32_t> q_seq;  // in place of one token a sequence
        bool permute = false, shared = false;
        int n_split = 0, window = 0;
    };
    const Batch batches[] = {
        {"two sequences", 4, 2, 4, 2, 300, {}},
        {"eight of 8 rows", 4, 2, 4, 8, 170, {}, false, false, 9},
        {"eight of 20 rows, a part each", 4, 5, 4, 8, 100, {}, false, false, 1},
        {"three of 40 rows, any order", 4, 10, 4, 3, 150, {}, true, false, 7},
        {"five, of which two are asked", 4, 4, 2, 5, 140, {1, 1, 3, 1, 3}, false, false, 6},
        {"one of six, once", 4, 4, 4, 6, 130, {4, 4, 4, 4, 4, 4}, true},
        {"slots that two sequences share, and a window", 4, 4, 4, 4, 200, {}, true, true, 11, 90},
        {"forty of 8 rows", 4, 2, 4, 40, 70, {}, true, false, 60},
        {"twenty that ask one sequence", 2, 3, 2, 20, 40, std::vector<int32_t>(20, 1), true, false, 25},
    };
    unsigned seed = 1700;
    for (const Batch& of : batches) {
        AttnShape s;
        s.name = std::string("apart, ") + of.name;
        s.n_kv = of.n_kv;
        s.rep = of.rep;
        s.k_group = s.v_group = of.group;
        s.k_ranks.assign(static_cast<size_t>(of.n_kv / of.group), 192);
        s.v_ranks.assign(static_cast<size_t>(of.n_kv / of.group), 224);
        s.v_latent = true;
        s.k_segments = {{q8, 32}, {q4, 64}, {q2, 96}};
        s.v_segments = {{q8, 64}, {q4, 96}, {q1, 64}};
        s.k_formats = s.v_formats = {q4};
        s.uniform = true;
        s.n_seq = of.n_seq;
        s.n_past = of.n_past;
        s.permute = of.permute;
        s.window = of.window;
        s.seed = seed++;
        AttnCase c(s);
        if (!of.q_seq.empty()) c.params.q_seq = of.q_seq.data();
        std::vector<uint64_t> seq(c.params.regions[0].seq, c.params.regions[0].seq + c.params.regions[0].n_slots);
        if (of.shared) {
            for (uint64_t& each : seq) each |= (each & 1) << 2;  // what the first has the third has too
        }
        c.params.regions[0].seq = seq.data();
        DeviceCase device(c.params, device_limits(), true);
        CHECK_MSG(kernel_of(device) == "mla" && device.args.apart > 0, s.name + ": planned otherwise");
        if (of.n_split != 0) device.args.apart = of.n_split;
        const double error = relative_error(device.run(), c.oracle());
        CHECK_MSG(error <= rounded_tolerance, s.name + ": relative error " + std::to_string(error));
        DeviceCase together(c.params);
        CHECK_MSG(together.args.apart == 0, s.name + ": apart unasked");
        const double between = relative_error(device.run(), together.run());
        CHECK_MSG(between <= rounded_tolerance, s.name + ": from all slots, " + std::to_string(between));
    }
}

// The same of rows that decode/ takes: full ones in formats that the kernel has code for and others, blocks of tokens with exact windows and
// without, latents; heads of every width, parts of one tile and of several, a part a token.
void rows_apart() {
    using enum Format;
    struct Batch {
        const char* name;
        Format format;
        int head_dim, n_kv, rep, n_seq, n_past;
        std::vector<int32_t> q_seq;  // in place of one token a sequence
        bool permute = false;
        int parts = 0, window = 0;
        bool alibi = false;
        Format v = none;       // another format than K's
        bool windows = false;  // before the middle
        int rank = 0;          // above 0: latents of so many channels
    };
    const Batch batches[] = {
        {"two of 6 rows", f16, 128, 2, 6, 2, 500, {}},
        {"nine of 8 rows", f16, 64, 2, 8, 9, 90, {}, true},
        {"three of 20 rows, in parts", f16, 128, 1, 20, 3, 600, {}, true, 40},
        {"a part each", f16, 128, 2, 2, 5, 130, {}, false, 1},
        {"a window", f16, 64, 2, 4, 3, 300, {}, true, 9, 70},
        {"forty, slopes", f16, 64, 2, 1, 40, 30, {}, true, 60, 0, true},
        {"three of unlike lengths", f16, 64, 2, 4, 3, 700, {0, 2}, false, 12},
        {"six that ask one of three", q8_0, 128, 2, 4, 3, 300, {2, 2, 2, 2, 2, 2}, true},
        {"twelve", q8_0, 64, 2, 6, 12, 60, {}, false, 30},
        {"three in parts", q4_0, 128, 2, 4, 3, 700, {}, true, 20},
        {"wide heads", f16, 256, 1, 4, 3, 300, {}, true},
        {"wide heads", q8_0, 256, 1, 4, 3, 300, {}, true, 7},
        {"four", q4, 128, 2, 4, 4, 150, {}, true},
        {"four", f32, 64, 2, 3, 4, 150, {}},
        {"six", c4, 128, 2, 4, 6, 200, {}, true, 0, 0, false, q4, true},
        {"three of 12 rows, in parts", c3, 64, 1, 12, 3, 500, {}, true, 20, 0, false, q3, true},
        {"twenty and a window", c4, 64, 2, 2, 20, 90, {}, true, 0, 60, false, f16, true},
        {"four that ask one of three", c2, 256, 1, 4, 3, 300, {1, 1, 1, 1}, true, 9, 0, false, q2, false},
        {"exact windows alone", f16, 128, 2, 6, 9, 90, {}, true, 0, 0, false, none, true},
        {"three windows in parts", f16, 64, 2, 4, 3, 500, {0, 2}, true, 12, 0, false, none, true},
        {"windows beside other rows", q8_0, 128, 2, 4, 4, 200, {}, true, 9, 0, false, none, true},
        {"latents that mla/ does not take", q3, 64, 2, 3, 3, 300, {}, true, 9, 0, false, q3, false, 96},
        {"nine such", q6, 128, 2, 4, 9, 80, {}, true, 20, 0, false, q6, false, 64},
    };
    unsigned seed = 2700;
    for (const Batch& of : batches) {
        if (of.format == f16 && of.head_dim == 256 && device_limits().shared_bytes < 128 * 1024) continue;
        AttnShape s;
        s.name = std::string("apart, rows of ") + format_name(of.format) + ", " + of.name;
        s.head_dim = of.head_dim;
        s.n_kv = of.n_kv;
        s.rep = of.rep;
        s.k_formats = {of.format};
        s.v_formats = {of.v == none ? of.format : of.v};
        if (of.windows) {
            s.k_formats.insert(s.k_formats.begin(), {f16, f16});
            s.v_formats.insert(s.v_formats.begin(), {f16, f16});
            s.region_tokens = {4, 60};
        }
        if (of.rank > 0) {
            s.v_latent = true;
            s.k_ranks = s.v_ranks = std::vector<int>(static_cast<size_t>(of.n_kv), of.rank);
        }
        s.uniform = true;
        s.n_seq = of.n_seq;
        s.n_past = of.n_past;
        s.permute = of.permute;
        s.window = of.window;
        s.alibi = of.alibi;
        s.seed = seed++;
        AttnCase c(s);
        if (!of.q_seq.empty()) c.params.q_seq = of.q_seq.data();
        DeviceCase device(c.params, device_limits(), true);
        CHECK_MSG(kernel_of(device) == "decode" && device.args.apart > 0,
                  s.name + ": planned for " + kernel_of(device));
        if (of.parts != 0) {
            device.args.apart = device.args.n_split = of.parts;
            device.args.least_tiles = 1;
        }
        const double error = relative_error(device.run(), c.oracle());
        CHECK_MSG(error <= tolerance_of(s), s.name + ": relative error " + std::to_string(error));
        CHECK_MSG(relative_error(device.run(), c.oracle(Perturb::score)) > tolerance_of(s),
                  s.name + ": scores 1 % off go unseen");
    }
}

}  // namespace

Cases own_steps_cases() { return {{"apart", apart}, {"rows_apart", rows_apart}}; }

}  // namespace lkv::test
