// Few query rows, full ones, blocks and latents: kernels/decode.
#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

void decode_samples() {
    compare_samples({
        {"decode", 2, 4, 1, 0, 0, false, Format::f16},
        {"decode", 2, 4, 1, 0, 0, false, Format::q4, 1, 200, 3},
        {"decode", 2, 4, 1, 0, 0, false, Format::q8_0, 1, 300},
        {"decode", 3, 2, 1, 0, 0, false, Format::q4_0, 2, 300, 1, 0, 64},  // rows that start on no 16 bytes
        {"decode", 2, 6, 1, 0, 0, false, Format::q4_0, 1, 200, 3},
        {"decode", 2, 1, 1, 0, 0, false, Format::q8_0, 8, 900, 1, 1, 64},
        {"decode", 3, 3, 1, 0, 0, false, Format::q8_0, 1, 100, 1, 0, 96},  // three blocks a head
        {"decode", 1, 4, 1, 0, 0, false, Format::q8_0, 1, 200, 1, 0, 256},
        {"decode", 4, 2, 2, 128, 96, false, Format::q5},
        {"decode", 2, 4, 1, 64, 64, true, Format::q4},
        {"decode", 2, 4, 1, 64, 64, true, Format::q8, 1, 1500, 1, 1},
        {"decode", 4, 4, 2, 128, 112, true, Format::f16, 1, 1000, 1, 3},
        {"decode", 2, 4, 2, 176, 256, true, Format::q5, 1, 100, 3},
        {"decode", 4, 4, 4, 256, 256, true, Format::q8, 1, 1060, 1, 3},
        {"decode", 4, 4, 4, 224, 96, true, Format::f16, 1, 200, 3},
        {"decode", 2, 4, 1, 0, 0, false, Format::n2, 1, 200, 3},
    });
}

// Latents that several heads share and K is rebuilt from: heads side by side in one tile of scores, rows that start on any bytes,
// dimensions that leave a batch of 64 part empty.
void shared_latents() {
    struct Heads {
        int n_kv, rep, head_dim, group, k_rank, v_rank;
    };
    unsigned seed = 200;
    for (const Heads& h : {Heads{8, 4, 128, 4, 256, 256}, Heads{4, 1, 128, 4, 240, 144}, Heads{4, 2, 96, 2, 128, 176},
                           Heads{4, 3, 80, 2, 144, 16}, Heads{2, 1, 256, 1, 192, 256}, Heads{8, 8, 64, 8, 160, 208}}) {
        for (const Format f : {Format::f16, Format::q8, Format::q4, Format::q3}) {
            for (const int n_tokens : {1, 2}) {
                AttnShape s;
                s.name = "K of " + std::to_string(h.k_rank) + " and V of " + std::to_string(h.v_rank) + " for " +
                         std::to_string(h.group) + " x " + std::to_string(h.rep) + " heads of " +
                         std::to_string(h.head_dim) + ", " + format_name(f) + ", " + std::to_string(n_tokens) +
                         " tokens";
                s.head_dim = h.head_dim;
                s.n_kv = h.n_kv;
                s.rep = h.rep;
                s.k_rebuild = s.v_latent = true;
                s.k_group = s.v_group = h.group;
                s.k_ranks.assign(static_cast<size_t>(h.n_kv / h.group), h.k_rank);
                s.v_ranks.assign(static_cast<size_t>(h.n_kv / h.group), h.v_rank);
                s.k_formats = s.v_formats = {f};
                // exact windows beside it
                if (seed % 3 == 0) s.k_formats = s.v_formats = {Format::f16, Format::f16, f};
                s.bias = seed % 2 == 0;
                s.norm = seed % 5 < 2;
                s.neox = seed % 7 < 4;
                s.permute = seed % 4 == 1;
                s.alibi = seed % 11 == 0;
                s.window = seed % 6 == 0 ? 90 : 0;
                s.n_past = 300;
                s.n_tokens = n_tokens;
                s.seed = seed++;
                compare(s);
            }
        }
    }
}

// Parts so long that every buffer is filled and emptied many times.
void long_parts() {
    struct Heads {
        int group, rep, rank;
    };
    for (const Heads& h :
         {Heads{1, 4, 64}, Heads{2, 4, 64}, Heads{1, 8, 128}, Heads{2, 2, 112}, Heads{4, 4, 256}, Heads{1, 1, 208}}) {
        for (const bool permute : {false, true}) {
            AttnShape s;
            s.name = "long parts, latents of " + std::to_string(h.rank) + " for " + std::to_string(h.group) + " x " +
                     std::to_string(h.rep) + " heads" + (permute ? ", slots in any order" : "");
            s.head_dim = 128;
            s.n_kv = 4;
            s.rep = h.rep;
            s.k_rebuild = s.v_latent = true;
            s.k_group = s.v_group = h.group;
            s.k_ranks.assign(static_cast<size_t>(4 / h.group), h.rank);
            s.v_ranks = s.k_ranks;
            s.k_formats = s.v_formats = {permute ? Format::f16 : Format::q4};
            s.uniform = true;
            s.permute = permute;
            s.n_past = 2500;
            compare(s);
        }
    }
}

// Tokens in the case's slots get other positions, of(position); what is returned holds them.
template <class Of>
std::vector<std::vector<int32_t>> move_tokens(AttnCase& c, const Of& of) {
    std::vector<std::vector<int32_t>> moved;
    for (int r = 0; r < c.params.n_regions; r++) {
        RegionView& region = c.params.regions[r];
        std::vector<int32_t>& to = moved.emplace_back(region.pos, region.pos + region.n_slots);
        for (int32_t& pos : to) pos = pos < 0 ? pos : of(pos);
        region.pos = to.data();
    }
    return moved;
}

// Positions that no span of the angle table covers: a K that is rebuilt takes several passes over a tile.
void scattered_positions() {
    for (const int stride : {2, 7, 1000, -2, -7, -1000}) {
        const bool shared = stride < 0;  // a wide latent of both heads
        AttnShape s;
        s.name = "rebuild, positions " + std::to_string(std::abs(stride)) + " apart" + (shared ? ", shared" : "");
        s.k_rebuild = true;
        s.head_dim = 64;
        s.n_kv = 2;
        s.rep = 2;
        if (shared) s.k_group = 2;
        s.k_ranks.assign(shared ? 1 : 2, shared ? 112 : 48);
        s.n_past = 90;
        s.n_tokens = 1;
        AttnCase c(s);
        // slots far apart swap places with their neighbours too
        const auto moved = move_tokens(c, [&](int32_t pos) { return (pos ^ 5) * std::abs(stride); });
        const std::vector<int32_t> q_pos(1, 100 * std::abs(stride));
        c.params.q_pos = q_pos.data();
        const std::vector<double> want = c.oracle();
        DeviceCase device(c.params);
        CHECK(kernel_of(device) == "decode");
        const double error = relative_error(device.run(), want);
        CHECK_MSG(error <= rounded_tolerance, s.name + ": relative error " + std::to_string(error));
    }
}

}  // namespace

Cases decode_cases() {
    return {{"samples", decode_samples},
            {"shared_latents", shared_latents},
            {"long_parts", long_parts, true},
            {"scattered_positions", scattered_positions}};
}

}  // namespace lkv::test
