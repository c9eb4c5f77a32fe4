// The wide kernel's plan, and how it lays out its shared memory.
#pragma once

#include "ops/cuda/kernel.h"
#include "ops/cuda/problem.h"

namespace lkv::cuda {

constexpr int n_wide_threads = 512;
constexpr int n_wide_warps = n_wide_threads / 32;
constexpr int max_wide_rows = 32;  // query rows of a thread block
constexpr int max_wide_tile = 128;
constexpr int max_wide_stages = 2;

// Warps of the wide kernel side by side over V's channel blocks; the others share out the slots.
LKV_HD constexpr int wide_channel_warps(int blocks) { return blocks <= 8 ? channel_warps(blocks) : n_wide_warps; }

// Slots of a tile times the warps side by side over K's channels, WidePlan::k_columns: sixteen warps are at work, or fewer where
// their partial scores would leave a tile no room.
constexpr int most_k_columns = 16 * n_wide_warps;
LKV_HD constexpr int least_k_columns(int tile) { return tile >= 64 ? most_k_columns : 4 * tile; }

struct WidePlan {
    int32_t rows;       // query rows of a thread block, 16 or 32
    int32_t stages;     // tiles in flight
    int32_t k_columns;  // slots of a tile times the warps side by side over K's channels
    int32_t k_pitch;    // bytes of a staged row, a multiple of 16, or of a whole row as stored
    int32_t v_pitch;
};

struct WideArgs : CutProblem, WidePlan {};

constexpr int wide_fixed = 1024;                 // bytes of the kernel's own variables, at most
constexpr int wide_marks = max_wide_stages + 2;  // tiles whose sequences and positions are kept

// Rows of K or V of one region, for the wide kernel's copies.
struct alignas(16) WideSource {
    const uint8_t* rows;  // slot 0; copies begin at group.first
    const uint64_t* seq;
    const int32_t* pos;
    int64_t page;  // bytes from a page of slots to the next one
    uint32_t row_bytes;
    int32_t n_slots;
    int32_t tiles_before;
    int32_t pitch;  // bytes from row to row of a tile
    int32_t whole;  // 1: rows lie in a tile as in memory
    GroupTable group;
};

// Shared memory of the wide kernel: where each part begins, in bytes, multiples of 16.
struct WideLayout {
    int chunks;    // descriptors of K, then V, per region; before them WideSource [n_regions][K, V]
    int queries;   // f16 [64·k_blocks][rows]
    int k_stages;  // [stages][tile][pitch]
    int v_stages;
    int marks;    // sequences, then positions, [wide_marks][tile]
    int planes;   // partial scores, f32 [warps over K channels][rows][tile + plane_pad]
    int weights;  // f16 [2][rows][tile + 8]
    int scales;   // f32 [2][rows]
    int total;

    static constexpr int plane_pad = 4;

    LKV_HD WideLayout(const WideArgs& p, int rows) {
        const int tile = p.tile;
        chunks = 2 * p.n_regions * static_cast<int>(sizeof(WideSource));
        queries = round_up(chunks + p.n_regions * 4 * (p.k_blocks + p.v_blocks) * static_cast<int>(sizeof(Chunk)), 16);
        k_stages = queries + p.k_blocks * 64 * rows * 2;
        v_stages = k_stages + p.stages * tile * p.k_pitch;
        marks = v_stages + p.stages * tile * p.v_pitch;
        planes = marks + wide_marks * tile * 12;
        // smaller tiles, see Parts, have more planes
        const int least = tile < least_shrunk_tile ? tile : least_shrunk_tile;
        weights = planes + rows * 4 * (p.k_columns + p.k_columns / least * plane_pad);
        scales = weights + 2 * rows * (tile + 8) * 2;
        total = scales + 2 * rows * 4;
        // the sums of the warps that share channels meet where the tiles were, but those that a warp keeps
        const int side = wide_channel_warps(p.v_blocks);
        const int merge = k_stages + (n_wide_warps / side - 1) * rows * 64 * side * 4;
        total = total > merge ? total : merge;
    }
};

cudaError_t launch_wide(const Plan& plan, cudaStream_t stream);

}  // namespace lkv::cuda
