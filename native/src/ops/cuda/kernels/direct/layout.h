// The direct kernel's plan, and how it lays out its shared memory.
#pragma once

#include "ops/cuda/kernel.h"
#include "ops/cuda/problem.h"

namespace lkv::cuda {

// Query rows of a thread block (16, 32 or 64) and 64-channel blocks of a warp (1, 2 or 4): what fits in registers.
struct Instance {
    int rows;
    int blocks;
};

constexpr Instance instances[] = {{16, 1}, {32, 1}, {64, 1}, {16, 2}, {32, 2}, {16, 4}};

LKV_HD constexpr int max_tile(int rows) { return rows == 16 ? 128 : 64; }  // slots, for that many query rows

struct DirectPlan {
    int32_t rows;  // Instance
    int32_t blocks;
    int32_t stages;   // tiles in flight
    int32_t k_pitch;  // bytes of a staged row, a multiple of 16
    int32_t v_pitch;
};

struct DirectArgs : CutProblem, DirectPlan {
    const uint32_t*
        fragments;  // rebuild: B as f16 pairs in the order of mma fragments, see pack_k_b; dimensions in their order
};

// Shared memory, in this order. Sizes in bytes, multiples of 16.
struct DirectLayout {
    int stage;    // one tile: K rows, V rows, sequences, positions
    int chunks;   // descriptors of K, then V, per region
    int planes;   // partial scores, f32 [warps over K channels][16·MB][tile + 8]
    int weights;  // f16 [16·MB][tile + 8]
    int scales;   // f32 [16·MB]
    int rebuilt;  // f16 [tile][64·blocks + 8]
    int raw;      // f32 [tile][head_dim + 4]

    LKV_HD DirectLayout(const DirectArgs& p, int rows) {
        const int k_blocks = p.rebuild != 0 ? (p.head_dim + 63) / 64 : p.k_blocks;
        stage = p.tile * (p.k_pitch + p.v_pitch + 12);
        chunks = p.n_regions * 4 * (p.k_blocks + p.v_blocks) * static_cast<int>(sizeof(Chunk));
        planes = channel_warps(k_blocks) * rows * (p.tile + 8) * 4;
        weights = rows * (p.tile + 8) * 2;
        scales = rows * 4;
        rebuilt = p.rebuild != 0 ? p.tile * (k_blocks * 128 + 16) : 0;
        raw = p.rebuild != 0 ? p.tile * (p.head_dim + 4) * 4 : 0;
    }
    // The sums of the warps that share channels meet where the tiles were.
    LKV_HD int total(const DirectArgs& p, int rows) const {
        const int all = p.stages * stage + chunks + planes + weights + scales + rebuilt + raw;
        const int merge = rows * 64 * p.v_blocks * 4 + chunks;
        return all > merge ? all : merge;
    }
};

cudaError_t launch_direct(const DirectArgs& args, cudaStream_t stream);
cudaError_t launch_rebuild(const DirectArgs& args, cudaStream_t stream);
cudaError_t launch_blocks(const DirectArgs& args, cudaStream_t stream);

}  // namespace lkv::cuda
