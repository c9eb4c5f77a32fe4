// The cases every implementation of latent_attn is tested on: paths, groups, ranks, formats, regions, masks.
#pragma once

#include <string>
#include <vector>

#include "attn/attn_case.h"
#include "ops/attn_mass.h"

namespace lkv::test {

struct Path {
    const char* name;
    bool k_rebuild;
    bool k_latent;
    bool v_latent;
};

inline constexpr Path paths[] = {
    {"full/full", false, false, false},  {"rebuild/latent", true, true, true}, {"rotated/latent", false, true, true},
    {"rebuild/full", true, true, false}, {"full/latent", false, false, true},
};

// Ranks that fall with the group and are no multiple of the 6-row block or the 64-channel merge.
inline std::vector<int> ragged(int n_groups, int group_width) {
    std::vector<int> ranks;
    for (int g = 0; g < n_groups; g++) ranks.push_back(std::max(16, (group_width * 3 / 4 - 16 * g) / 16 * 16));
    return ranks;
}

template <class Compare>
void paths_and_shapes(Compare&& compare) {
    struct Heads {
        int n_kv, rep, head_dim, k_group, v_group;
    };
    constexpr Heads heads[] = {{4, 1, 64, 1, 1}, {4, 4, 64, 4, 4},  {4, 1, 80, 2, 4},
                               {2, 2, 96, 2, 1}, {3, 1, 128, 1, 3}, {2, 3, 40, 1, 2}};
    unsigned seed = 1;
    for (const Path& path : paths) {
        for (const Heads& h : heads) {
            for (const int n_tokens : {1, 3, 64, 130}) {
                AttnShape s;
                s.n_kv = h.n_kv;
                s.rep = h.rep;
                s.head_dim = h.head_dim;
                s.k_group = path.k_latent ? h.k_group : 1;
                s.v_group = path.v_latent ? h.v_group : 1;
                s.k_rebuild = path.k_rebuild;
                s.v_latent = path.v_latent;
                if (path.k_latent) s.k_ranks = ragged(h.n_kv / s.k_group, s.k_group * h.head_dim);
                if (path.v_latent) s.v_ranks = ragged(h.n_kv / s.v_group, s.v_group * h.head_dim);
                s.n_tokens = n_tokens;
                s.n_past = n_tokens == 64 ? 0 : 150;
                s.neox = seed % 2 == 0;
                s.bias = seed % 3 == 0;
                s.norm = seed % 5 == 0;
                s.permute = seed % 2 == 1;
                s.seed = seed++;
                s.name = std::string(path.name) + ", " + std::to_string(h.n_kv) + " x " + std::to_string(h.rep) +
                         " heads of " + std::to_string(h.head_dim) + ", " + std::to_string(n_tokens) + " tokens";
                compare(s);
            }
        }
    }
}

// Heads wider than 256, as Gemma 4 has.
template <class Compare>
void wide_heads(Compare&& compare) {
    unsigned seed = 300;
    for (const Path& path : paths) {
        for (const int n_tokens : {1, 5, 70}) {
            AttnShape s;
            s.n_kv = 2;
            s.rep = 4;
            s.head_dim = seed % 4 == 0 ? 320 : 512;
            s.k_rebuild = path.k_rebuild;
            s.v_latent = path.v_latent;
            s.k_group = path.k_latent ? 2 : 1;
            s.v_group = path.v_latent ? 2 : 1;
            if (path.k_latent) s.k_ranks = {192};
            if (path.v_latent) s.v_ranks = {256};
            s.k_formats = {Format::f16, Format::q8};
            s.v_formats = {Format::f16, Format::q8};
            s.n_tokens = n_tokens;
            s.n_past = 230;
            s.neox = true;
            s.norm = path.k_rebuild;
            s.softcap = seed % 5 == 0 ? 4.0F : 0.0F;
            s.permute = true;
            s.seed = seed++;
            s.name = std::string("heads of ") + std::to_string(s.head_dim) + ", " + path.name + ", " +
                     std::to_string(n_tokens) + " tokens";
            compare(s);
        }
    }
}

template <class Compare>
void formats(Compare&& compare) {
    for (const Format format : all_formats) {
        if (format_in_token_blocks(format)) continue;
        for (const int n_tokens : {1, 2, 40}) {
            AttnShape s;
            s.name = std::string(format_name(format)) + ", " + std::to_string(n_tokens) + " tokens";
            s.k_formats = {format};
            s.v_formats = {format};
            s.n_tokens = n_tokens;
            s.permute = true;
            s.seed = static_cast<unsigned>(format);
            compare(s);
            s.name += ", latent";
            s.k_rebuild = s.v_latent = true;
            s.k_ranks = {64, 32};
            s.v_ranks = {32, 96};
            compare(s);
        }
    }
}

// Rows that begin with their scales, beside exact ones and alone: several widths of codes a group, several groups, dropped channels.
template <class Compare>
void scaled_rows(Compare&& compare) {
    using enum Format;
    using Group = std::vector<SegmentSpec>;
    struct Rows {
        const char* name;
        Group k, v;
    };
    const Rows rows[] = {
        {"n8 n4 n2 n1", {{n8, 32}, {n4, 48}, {n2, 16}, {n1, 32}}, {{n4, 32}, {n2, 48}, {n1, 16}}},
        {"n2", {{n2, 112}, {none, 16}}, {{n2, 80}, {none, 16}}},
        {"n6 n5 n3", {{n6, 48}, {n5, 16}, {n3, 32}, {none, 32}}, {{n5, 32}, {n3, 64}}},
        {"n1", {{n1, 16}, {none, 112}}, {{n1, 16}, {none, 80}}},
    };
    unsigned seed = 700;
    for (const Rows& of : rows) {
        for (const int n_tokens : {1, 2, 7, 40}) {
            AttnShape s;
            s.n_kv = 4;
            s.rep = seed % 2 == 0 ? 2 : 1;
            s.k_group = s.v_group = 2;
            s.k_ranks = {128, 128};
            s.v_ranks = {96, 96};
            s.k_rebuild = seed % 3 == 0;
            s.v_latent = true;
            s.k_rows = {{of.k, of.k}};
            s.v_rows = {{of.v, of.v}};
            s.k_formats = s.v_formats = {n8};
            if (seed % 4 != 0) {
                s.k_formats = s.v_formats = {f16, f16, n8};
                const Group exact_k = {{f16, 128}};
                const Group exact_v = {{f16, 96}};
                s.k_rows.insert(s.k_rows.begin(), 2, {exact_k, exact_k});
                s.v_rows.insert(s.v_rows.begin(), 2, {exact_v, exact_v});
            }
            s.n_tokens = n_tokens;
            s.n_past = 200;
            s.permute = seed % 2 == 1;
            s.n_seq = seed % 5 == 0 ? 2 : 1;
            s.seed = seed++;
            s.name = std::string(of.name) + " scaled by the row, " + std::to_string(n_tokens) + " tokens";
            compare(s);
        }
    }
}

template <class Compare>
void regions(Compare&& compare) {
    for (const Path& path : paths) {
        for (const int n_tokens : {1, 70}) {
            AttnShape s;
            s.name = std::string("three regions, ") + path.name + ", " + std::to_string(n_tokens) + " tokens";
            s.n_kv = 4;
            s.k_rebuild = path.k_rebuild;
            s.v_latent = path.v_latent;
            if (path.k_latent) {
                s.k_group = 2;
                s.k_ranks = {96, 64};
            }
            if (path.v_latent) {
                s.v_group = 4;
                s.v_ranks = {208};
            }
            s.k_formats = {Format::f16, Format::f16, Format::q4};
            s.v_formats = {Format::f16, Format::q8, Format::q3};
            s.dropped = 32;
            s.n_tokens = n_tokens;
            s.n_past = 230;
            s.permute = true;
            compare(s);
            AttnShape hollow = s;
            hollow.name += ", one that keeps no channel of a group";
            hollow.dropped = 96;
            compare(hollow);
            s.name += ", one empty";
            s.k_formats = {Format::f16, Format::f16};
            s.v_formats = {Format::f16, Format::f16};
            s.first_pos = 10000;
            s.empty_first = true;
            compare(s);
        }
    }
}

template <class Compare>
void masks(Compare&& compare) {
    for (const int n_tokens : {1, 9, 100}) {
        for (const Path& path : paths) {
            AttnShape s;
            s.k_rebuild = path.k_rebuild;
            s.v_latent = path.v_latent;
            if (path.k_latent) s.k_ranks = {48, 64};
            if (path.v_latent) s.v_ranks = {64, 48};
            s.n_tokens = n_tokens;
            s.permute = true;
            const std::string name = std::string(path.name) + ", " + std::to_string(n_tokens) + " tokens";
            s.name = "window, " + name;
            s.window = 33;
            compare(s);
            s.window = 0;
            s.name = "ALiBi, " + name;
            s.alibi = true;
            compare(s);
            s.alibi = false;
            s.name = "soft cap, " + name;
            s.softcap = 4.0f;
            compare(s);
            s.softcap = 0.0f;
            s.name = "three sequences, " + name;
            s.n_seq = 3;
            compare(s);
            s.name = "late positions, " + name;
            s.first_pos = 1000000;
            s.n_rot = 32;
            compare(s);
        }
    }
}

// K of the last region in blocks of 32 slots: every path, one query row, a few, and enough for a dequantized tile.
template <class Compare>
void blocks(Compare&& compare) {
    unsigned seed = 100;
    for (const Format format : {Format::c8, Format::c4, Format::c3, Format::c2}) {
        for (const Path& path : paths) {
            for (const int n_tokens : {1, 5, 70}) {
                AttnShape s;
                s.n_kv = 4;
                s.rep = seed % 2 == 0 ? 3 : 1;
                s.head_dim = seed % 3 == 0 ? 80 : 64;
                s.k_rebuild = path.k_rebuild;
                s.v_latent = path.v_latent;
                if (path.k_latent) {
                    s.k_group = 4;
                    s.k_ranks = {208};
                }
                if (path.v_latent) {
                    s.v_group = 2;
                    s.v_ranks = {96, 64};
                }
                s.k_formats = {Format::f16, Format::q4, format};
                s.v_formats = {Format::f16, Format::f16, format_of_rows(format)};
                s.n_tokens = n_tokens;
                s.n_past = 230;
                s.permute = seed % 4 != 0;
                s.n_seq = seed % 5 == 0 ? 3 : 1;
                s.window = seed % 7 == 0 ? 100 : 0;
                s.seed = seed++;
                s.name = std::string(format_name(format)) + " blocks, " + path.name + ", " + std::to_string(n_tokens) +
                         " tokens";
                compare(s);
            }
        }
    }
    AttnShape wide;  // more channels in a segment than are dequantized at once
    wide.name = "c2 blocks, a segment of 512 channels";
    wide.n_kv = 8;
    wide.k_group = 8;
    wide.k_ranks = {512};
    wide.dropped = 16;
    wide.k_formats = {Format::f16, Format::c2};
    wide.v_formats = {Format::f16, Format::q2};
    compare(wide);
}

// Weights for n tokens, every fifth of which counts for nothing.
inline std::vector<QueryWeight> query_weights(int n, bool has_noise) {
    std::vector<QueryWeight> weights;
    for (int t = 0; t < n; t++) {
        weights.push_back({t % 5 == 4 ? 0.0f : 1.0f, has_noise ? 1.0f + 0.1f * static_cast<float>(t % 7) : 1.0f});
    }
    return weights;
}

}  // namespace lkv::test
