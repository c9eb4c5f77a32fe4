// How the attention kernel lays out its shared memory; read by the kernel and by the plan that chooses tiles for it.
#pragma once

#include "base/half.h"
#include "ops/cuda/args.h"

namespace lkv::cuda {

constexpr int n_threads = 256;
constexpr int n_warps = n_threads / 32;
LKV_HD constexpr int max_tile(int rows) { return rows == 16 ? 128 : 64; }  // slots, for that many query rows

LKV_HD constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Warps side by side over the channel blocks; the others share out the slots.
LKV_HD constexpr int channel_warps(int blocks) { return blocks <= 1 ? 1 : (blocks <= 2 ? 2 : (blocks <= 4 ? 4 : 8)); }

// Shared memory, in this order. Sizes in bytes, multiples of 16.
struct SharedPlan {
    int stage;    // one tile: K rows, V rows, sequences, positions
    int chunks;   // descriptors of K, then V, per region
    int planes;   // partial scores, f32 [warps over K channels][16·MB][tile + 8]
    int weights;  // f16 [16·MB][tile + 8]
    int scales;   // f32 [16·MB]
    int rebuilt;  // f16 [tile][64·blocks + 8]
    int raw;      // f32 [tile][head_dim + 4]

    LKV_HD SharedPlan(const AttnArgs& p, int rows) {
        const int k_blocks = p.k_b != nullptr ? (p.head_dim + 63) / 64 : p.k_blocks;
        stage = p.tile * (p.k_pitch + p.v_pitch + 12);
        chunks = p.n_regions * 4 * (p.k_blocks + p.v_blocks) * static_cast<int>(sizeof(Chunk));
        planes = channel_warps(k_blocks) * rows * (p.tile + 8) * 4;
        weights = rows * (p.tile + 8) * 2;
        scales = rows * 4;
        rebuilt = p.k_b != nullptr ? p.tile * (k_blocks * 128 + 16) : 0;
        raw = p.k_b != nullptr ? p.tile * (p.head_dim + 4) * 4 : 0;
    }
    // The sums of the warps that share channels meet where the tiles were.
    LKV_HD int total(const AttnArgs& p, int rows) const {
        const int all = p.stages * stage + chunks + planes + weights + scales + rebuilt + raw;
        const int merge = rows * 64 * p.v_blocks * 4 + chunks;
        return all > merge ? all : merge;
    }
};

constexpr int widest_tile = 128;  // slots of a tile of the wide kernel

// Shared memory of the wide kernel, in this order. Sizes in bytes, multiples of 16.
struct WidePlan {
    int groups;   // GroupTable of K and V per region
    int chunks;   // descriptors of K, then V, per region
    int queries;  // f16 [64·k_blocks][rows]
    int stage;    // one tile: K rows, V rows, sequences, positions
    int planes;   // partial scores, f32 [warps over K channels][rows][tile + 8]
    int weights;  // f16 [rows][tile + 8]
    int scales;   // f32 [rows]

    LKV_HD WidePlan(const AttnArgs& p, int rows) {
        groups = max_regions * 2 * static_cast<int>(sizeof(GroupTable));
        chunks = round_up(p.n_regions * 4 * (p.k_blocks + p.v_blocks) * static_cast<int>(sizeof(Chunk)), 16);
        queries = p.k_blocks * 64 * rows * 2;
        stage = p.tile * (p.k_pitch + p.v_pitch + 12);
        planes = n_warps / (p.tile / 16) * rows * (p.tile + 8) * 4;
        weights = rows * (p.tile + 8) * 2;
        scales = rows * 4;
    }
    // The sums of the warps that share channels meet where the tiles were.
    LKV_HD int total(const AttnArgs& p, int rows) const {
        const int before = groups + chunks + queries;
        const int all = before + p.stages * stage + planes + weights + scales;
        const int merge = before + rows * (64 * p.v_blocks + 4) * 4;
        return all > merge ? all : merge;
    }
};

constexpr int decode_rows = 8;  // query rows of the decode kernel: the columns of a tensor-core tile

// Shared memory of the decode kernel, in this order. Sizes in bytes, multiples of 16.
struct DecodePlan {
    int groups;   // GroupTable of K and V per region
    int chunks;   // descriptors of K, then V, per region
    int queries;  // f16 [8][64·k_blocks]
    int stage;    // one warp's tile: K rows, V rows, sequences, positions

    LKV_HD explicit DecodePlan(const AttnArgs& p) {
        groups = max_regions * 2 * static_cast<int>(sizeof(GroupTable));
        const int blocks = p.k_blocks > p.v_blocks ? p.k_blocks : p.v_blocks;
        chunks = p.n_regions * 8 * round_up_power(blocks) * static_cast<int>(sizeof(Chunk));
        queries = decode_rows * 64 * round_up_power(blocks) * 2;
        stage = p.tile * (p.k_pitch + p.v_pitch + 12);
    }
    LKV_HD int total(const AttnArgs& p) const {
        const int all = groups + chunks + queries + n_warps * p.stages * stage;
        const int rows = p.n_tokens * p.unit * (p.n_head / p.n_kv);
        const int blocks = p.k_blocks > p.v_blocks ? p.k_blocks : p.v_blocks;
        const int pitch = (64 * round_up_power(blocks) + 8) * 4;
        const int merge = (n_warps + 1) * decode_rows * 8 + n_warps * rows * pitch;
        const int parts = rows * (p.n_split * 4 + pitch);
        const int most = merge > parts ? merge : parts;
        return all > most ? all : most;
    }
    LKV_HD static constexpr int round_up_power(int blocks) { return blocks <= 1 ? 1 : (blocks <= 2 ? 2 : 4); }
};

}  // namespace lkv::cuda
