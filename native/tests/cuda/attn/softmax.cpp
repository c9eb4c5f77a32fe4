// Parts, their merging and what leaves it, by every kernel: ops/cuda/softmax.
#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

// Results that leave times V's Hadamard matrix, of one part and of several.
void rotated_results() {
    struct Heads {
        int head_dim, rep, n_tokens, hadamard;
    };
    for (const Heads& h : {Heads{128, 4, 1, 64}, Heads{64, 6, 1, 64}, Heads{256, 2, 1, 64}, Heads{96, 3, 2, 32},
                           Heads{80, 1, 7, 16}, Heads{64, 8, 8, 64}}) {
        for (const Format format : {Format::q8_0, Format::q4_0, Format::f16}) {
            AttnShape s;
            s.name = "results times a Hadamard matrix of " + std::to_string(h.hadamard) + ", " +
                     std::to_string(h.n_tokens) + " tokens";
            if (format != Format::f16 && h.head_dim % 32 != 0) continue;
            s.head_dim = h.head_dim;
            s.n_kv = 2;
            s.rep = h.rep;
            s.n_tokens = h.n_tokens;
            s.k_formats = s.v_formats = {format};
            s.n_past = 600;
            AttnCase c(s);
            const std::vector<double> want = times_hadamard(c.oracle(), h.hadamard);
            for (const int n_split : {1, 3}) {
                DeviceCase device(c.params);
                device.args.v_hadamard = h.hadamard;
                device.args.least_tiles = 1;
                device.args.n_split = n_split;
                device.keeps_parts = true;
                const double error = relative_error(device.run(), want);
                CHECK_MSG(error <= tolerance_of(s), s.name + ", " + std::to_string(n_split) + " parts, " +
                                                        kernel_of(device) + ": relative error " +
                                                        std::to_string(error));
            }
        }
    }
}

void nothing_visible() {
    for (const bool rebuild : {false, true}) {
        for (const int n_tokens : {1, 140}) {
            AttnShape s;
            s.n_tokens = n_tokens;
            s.k_rebuild = s.v_latent = rebuild;
            if (rebuild) s.k_ranks = s.v_ranks = {48, 64};
            AttnCase c(s);
            if (rebuild && n_tokens == 1) {
                // parts without a tile
                DeviceCase empty(c.params);
                empty.args.n_slots = empty.keep(std::vector<int32_t>(static_cast<size_t>(c.params.n_regions), 0));
                for (const float x : empty.run()) CHECK(x == 0.0f);
            }
            std::vector<int32_t> other(static_cast<size_t>(c.params.n_tokens), 5);
            c.params.q_seq = other.data();
            DeviceCase device(c.params);
            for (const float x : device.run()) CHECK(x == 0.0f);
        }
    }
}

// A deeper cache than the plan was shown: the number of slots is read on the device.
void grows() {
    AttnShape s;
    s.name = "growing cache";
    s.n_past = 1000;
    AttnCase c(s);
    DeviceCase device(c.params);
    CHECK_MSG(device.args.n_split > 1, "a long cache is split");
    CHECK_MSG(relative_error(device.run(), c.oracle()) <= exact_tolerance, s.name);
    const int32_t fewer = 37;
    device.args.n_slots = device.keep(std::vector<int32_t>{fewer});
    c.params.regions[0].n_slots = fewer;
    CHECK_MSG(relative_error(device.run(), c.oracle()) <= exact_tolerance, s.name + ", seen early");
}

// A warm-up on one slot a region leaves nothing behind that the real attention reads, and takes whole groups of K and V.
void warm_ups() {
    struct Shape {
        const char* name;
        int n_kv, rep, rank, group;
        bool rebuild;
    };
    constexpr Shape shapes[] = {{"full rows", 8, 4, 0, 1, false},
                                {"64 channels a head", 8, 4, 64, 1, true},
                                {"128 channels of two heads", 8, 4, 128, 2, true},
                                {"256 channels of four heads", 8, 4, 256, 4, true},
                                {"latents of all heads", 8, 4, 512, 8, false}};
    for (const Shape& of : shapes) {
        AttnShape s;
        s.name = of.name;
        s.head_dim = 128;
        s.n_kv = of.n_kv;
        s.rep = of.rep;
        s.k_rebuild = of.rebuild;
        s.v_latent = of.rank > 0;
        s.k_group = s.v_group = of.group;
        if (of.rank > 0) s.k_ranks = s.v_ranks = std::vector<int>(static_cast<size_t>(of.n_kv / of.group), of.rank);
        s.k_formats = s.v_formats = {Format::q8};
        s.n_past = 300;
        const AttnCase c(s);
        DeviceCase device(c.params);
        const std::vector<float> want = device.run();
        const auto few = cuda::warm_up(device.args);
        if (!few) {
            CHECK_MSG(false, s.name + ": no warm-up");
            continue;
        }
        cuda::Plan args = *few;
        CHECK_MSG(args.items > 0 && of.n_kv / args.unit % args.items == 0 && args.items * args.unit % of.group == 0,
                  s.name + ": " + std::to_string(args.items) + " work items");
        args.n_slots = device.keep(std::vector<int32_t>(cuda::max_regions, 1));
        cuda_check(cuda::attend(args, nullptr), "a warm-up");
        cuda_check(cudaDeviceSynchronize(), "a warm-up");
        CHECK_MSG(device.run() == want, s.name + ": another result behind a warm-up");
    }
}

}  // namespace

Cases softmax_cases() {
    return {{"rotated_results", rotated_results},
            {"nothing_visible", nothing_visible},
            {"grows", grows},
            {"warm_ups", warm_ups}};
}

}  // namespace lkv::test
