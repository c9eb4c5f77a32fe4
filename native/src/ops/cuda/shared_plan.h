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

}  // namespace lkv::cuda
