// The prefill kernel's plan, and how it lays out its shared memory.
#pragma once

#include "ops/cuda/kernel.h"
#include "ops/cuda/problem.h"
#include "ops/cuda/softmax/sight.h"

namespace lkv::cuda {

// The prefill kernel: 128 / wc query rows a thread block, wc warps side by side over V's channels (PrefillPlan::wc).
constexpr int n_maker_warps = 4;  // wc = 1: they make tiles for the other eight
constexpr int prefill_channels[] = {0, 128, 512, 0, 1024, 0, 0, 0, 1024};  // of V, and wc = 1: of K
LKV_HD constexpr int prefill_threads(int wc) { return n_threads + (wc == 1 ? 32 * n_maker_warps : 0); }
LKV_HD constexpr int prefill_tile(int wc) { return wc >= 4 ? 32 : 64; }  // slots

struct PrefillPlan {
    int32_t wc;       // warps side by side over V's channels, 1, 2 or 4; 8 where shared memory is small
    int32_t buffers;  // tiles that are made ahead
    int32_t stages;   // tiles in flight
    int32_t k_pitch;  // bytes of a staged row, a multiple of 16
    int32_t v_pitch;
    int32_t values_at;  // above 0: V is in K's rows and made with it, from this byte of the tile's rows on
};

struct PrefillArgs : CutProblem, PrefillPlan {};

// How a region's tiles are read.
struct alignas(16) PrefillRegion {
    int n_slots;  // in use
    int staged;   // 1: copied ahead; 0: rows too wide for the stages are read where they lie
    int k_step;   // bytes from slot to slot
    int v_step;
};

// What belongs to a tile.
struct alignas(16) PrefillMeta {
    uint64_t seq[64];
    int32_t pos[64];
    Seen seen;  // by the thread block's rows
};

// Shared memory of the prefill kernel, in this order. Sizes in bytes, multiples of 16.
struct PrefillLayout {
    int k16;           // blocks of 16 channels of K as it is multiplied, an even number
    int k_tile_pitch;  // bytes, an odd multiple of 16: eight rows start in different banks
    int v_tile_pitch;
    int chunks;  // descriptors of K, then V, per region; then, from the bytes below, ends of runs and GroupTables
    int run_ends;
    int groups;
    int meta;     // Sight, PrefillRegion [n_regions], PrefillMeta [2]
    int queries;  // wc > 1: f16 [rows][k_tile_pitch]
    int weights;  // wc > 1: f16 [rows][tile + 8]
    int maxima;   // wc > 1: f32 [rows][wc]
    int tile;     // f16 K and V side by side; wc > 1: one after the other in the same place
    int stage;    // one tile as stored: K rows, V rows, sequences, positions

    LKV_HD explicit PrefillLayout(const PrefillArgs& p) {
        const int wc = p.wc;
        const int slots = prefill_tile(wc);
        k16 = 4 * p.k_blocks;
        const int deep = wc == 1 ? prefill_depth(k16, p.v_blocks) : 0;
        k_tile_pitch = 32 * (wc == 1 ? deep : k16) + 16;
        v_tile_pitch = p.values_at > 0 ? k_tile_pitch : 32 * (wc == 1 ? deep : 4 * p.v_blocks) + 16;
        const int n_chunks = p.n_regions * 4 * (p.k_blocks + p.v_blocks);
        run_ends = n_chunks * static_cast<int>(sizeof(Chunk));
        groups = round_up(run_ends + n_chunks, 16);
        chunks = groups + max_regions * 2 * static_cast<int>(sizeof(GroupTable));
        meta = static_cast<int>(sizeof(Sight) + max_regions * sizeof(PrefillRegion) + 2 * sizeof(PrefillMeta));
        const int rows = 128 / wc;
        queries = wc == 1 ? 0 : rows * k_tile_pitch;
        weights = wc == 1 ? 0 : rows * (2 * slots + 16);
        maxima = wc == 1 ? 0 : rows * wc * 4;
        const int wider = k_tile_pitch > v_tile_pitch ? k_tile_pitch : v_tile_pitch;
        tile = wc == 1 ? slots * (k_tile_pitch + v_tile_pitch) : slots * wider;
        stage = slots * (p.k_pitch + p.v_pitch + 12);
    }
    LKV_HD int total(const PrefillArgs& p) const {
        // a step is read ahead, past the last row
        return chunks + meta + queries + weights + maxima + p.buffers * tile + p.stages * stage + 128;
    }
    // wc = 1: blocks of 16 channels of K and of V that the kernel is compiled for
    LKV_HD static constexpr int prefill_depth(int k16, int v_blocks) { return k16 <= 4 && v_blocks <= 1 ? 4 : 8; }
};

// For kernels that make rows of their own for this one (expand/): tile, stages and parts into p and its plan. k_pitch, v_pitch: of the region
// with the smallest rows, the compressed one; exact windows beside it are a few tiles, read where they lie instead of making every stage
// four times as large. any_rows: even so few that warps stay idle
bool plan_prefill_rows(int capacity, const Device& device, int k_pitch, int v_pitch, PrefillArgs& p, bool any_rows);
cudaError_t launch_prefill(const PrefillArgs& args, cudaStream_t stream);

}  // namespace lkv::cuda
