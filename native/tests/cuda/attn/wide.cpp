// Wide joint latents: kernels/wide, and what takes their neighbours.
#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

void wide_samples() {
    compare_samples({
        {"wide", 2, 6, 1, 0, 0, false, Format::q8_0, 3, 200},
        {"wide", 2, 6, 1, 0, 0, false, Format::q4_0, 5, 200, 2},
        {"wide", 4, 4, 4, 256, 192, false, Format::q3},
        {"wide", 4, 4, 4, 256, 192, false, Format::n5},
        {"wide", 4, 3, 4, 64, 256, false, Format::q5, 1, 12000},
        {"wide", 16, 1, 16, 1280, 1536, false, Format::q8, 1, 70},
    });
}

// Shapes of the models this is for: head_dim 128, grouped queries, wide joint latents.
void wide() {
    struct Wide {
        const char* name;
        int n_kv, rep, k_rank, v_rank, k_group, v_group;
        bool rebuild;
    };
    constexpr Wide cases[] = {
        {"8B full", 8, 4, 0, 0, 1, 1, false},
        {"8B joint rotated", 8, 4, 512, 512, 8, 8, false},
        {"8B joint rotated, wide", 8, 4, 1024, 768, 8, 8, false},
        {"8B rebuild", 8, 4, 256, 256, 4, 4, true},
        {"7B joint rotated", 16, 1, 1280, 2048, 16, 16, false},
        {"7B rebuild joint", 8, 1, 1024, 1024, 8, 8, true},
    };
    for (const Wide& w : cases) {
        for (const Format f : {Format::f16, Format::q4}) {
            for (const int n_tokens : {1, 20, 70}) {
                AttnShape s;
                s.name = std::string(w.name) + ", " + format_name(f) + ", " + std::to_string(n_tokens) + " tokens";
                s.head_dim = 128;
                s.n_kv = w.n_kv;
                s.rep = w.rep;
                s.k_rebuild = w.rebuild;
                s.k_group = w.k_group;
                s.v_group = w.v_group;
                if (w.k_rank > 0) s.k_ranks.assign(static_cast<size_t>(w.n_kv / w.k_group), w.k_rank);
                if (w.v_rank > 0) s.v_ranks.assign(static_cast<size_t>(w.n_kv / w.v_group), w.v_rank);
                s.v_latent = w.v_rank > 0;
                s.k_formats = s.v_formats = {f};
                s.n_past = 70;
                s.n_tokens = n_tokens;
                compare(s);
                if (!s.v_latent || n_tokens > 20) continue;
                s.name += ", one format a row";
                s.uniform = true;
                compare(s);
            }
        }
    }
}

// Regions of which one starts its rows on 16 bytes and one, with more bytes or fewer, does not.
void wide_regions() {
    using enum Format;
    for (const std::vector<Format>& formats :
         {std::vector{q8, q4_0}, {q4_0, q8}, {f16, q8}, {q4, f16}, {q4_0, q4, q8}}) {
        for (const int rank : {512, 2048}) {
            for (const int n_tokens : {1, 3}) {
                AttnShape s;
                s.name = "a latent of " + std::to_string(rank) + " in regions of";
                for (const Format f : formats) s.name += std::string(" ") + format_name(f);
                s.name += ", " + std::to_string(n_tokens) + " tokens";
                s.n_kv = 4;
                s.rep = 2;
                s.k_group = s.v_group = 4;
                s.k_ranks = s.v_ranks = {rank};
                s.v_latent = true;
                s.k_formats = s.v_formats = formats;
                s.uniform = true;
                s.n_past = 200;
                s.n_tokens = n_tokens;
                compare(s);
            }
        }
    }
}

// Latents of more than 1024 channels: every copy path, holes, regions of different formats, several tokens and sequences.
void wide_latents() {
    struct Wide {
        const char* name;
        int k_rank, v_rank, rep;
        std::vector<Format> formats;  // of the regions
        bool uniform;
        int n_tokens, n_seq, dropped;
    };
    using enum Format;
    const Wide cases[] = {
        {"f16", 2048, 2048, 8, {f16}, true, 1, 1, 0},
        {"q8", 2048, 2048, 8, {q8}, true, 1, 1, 0},
        {"q4", 2048, 2048, 8, {q4}, true, 1, 1, 0},
        {"q5", 2048, 2048, 8, {q5}, true, 1, 1, 0},
        {"f16, two tokens", 2048, 2048, 4, {f16}, true, 2, 1, 0},
        {"q8, two sequences", 2048, 2048, 4, {q8}, true, 1, 2, 0},
        {"q4, four tokens of two sequences", 2048, 1600, 2, {q4}, true, 2, 2, 0},
        {"two formats a row", 2048, 2048, 8, {q4}, false, 1, 1, 0},
        {"f16, odd halves", 1216, 1984, 8, {f16}, true, 1, 1, 0},
        {"q8, odd halves", 1216, 1984, 7, {q8}, true, 1, 1, 0},
        {"f16, K of one block", 64, 2048, 8, {f16}, true, 1, 1, 0},
        {"f16, ragged", 1000, 2000, 3, {f16}, true, 1, 1, 0},
        {"regions of f16", 2048, 2048, 8, {f16, f16, f16}, true, 1, 1, 0},
        {"regions of f16 and q8", 2048, 2048, 8, {f16, q8}, true, 1, 1, 0},
        {"regions of f16, q8 and q4, fewer channels", 2048, 2048, 4, {f16, q8, q4}, true, 2, 1, 64},
    };
    for (const Wide& of : cases) {
        for (const bool permute : {false, true}) {
            AttnShape s;
            s.name = std::string("wide latents, ") + of.name + (permute ? ", holes" : "");
            s.n_kv = 4;
            s.rep = of.rep;
            s.k_group = s.v_group = 4;
            s.k_ranks = {of.k_rank};
            s.v_ranks = {of.v_rank};
            s.v_latent = true;
            s.k_formats = s.v_formats = of.formats;
            s.uniform = of.uniform;
            s.n_tokens = of.n_tokens;
            s.n_seq = of.n_seq;
            s.dropped = of.dropped;
            s.n_past = 150;
            s.permute = permute;
            s.window = permute ? 120 : 0;
            compare(s);
        }
    }
}

}  // namespace

Cases wide_cases() {
    return {{"samples", wide_samples}, {"wide", wide}, {"wide_regions", wide_regions}, {"wide_latents", wide_latents}};
}

}  // namespace lkv::test
