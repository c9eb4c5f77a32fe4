// The decode kernel's plan, and how it lays out its shared memory.
#pragma once

#include "cache/formats.h"
#include "ops/cuda/kernel.h"
#include "ops/cuda/problem.h"

namespace lkv::cuda {

// A head's dimensions in tiles of 16: column n < 8 of a tile is the first dimension of a RoPE plane, column n + 8 the second,
// so that both come to the same thread. Dimensions that are not rotated follow; -1 pads.
LKV_HD inline int plane_tiles(int head_dim, int n_rot) { return (n_rot / 2 + 7) / 8 + (head_dim - n_rot + 15) / 16; }
LKV_HD inline int plane_dim(int head_dim, int n_rot, bool neox, int column) {
    const int rotated_tiles = (n_rot / 2 + 7) / 8;
    const int tile = column / 16;
    if (tile >= rotated_tiles) {
        const int dim = n_rot + column - 16 * rotated_tiles;
        return dim < head_dim ? dim : -1;
    }
    const int plane = 8 * tile + column % 8;
    if (plane >= n_rot / 2) return -1;
    const int second = column % 16 / 8;
    return neox ? plane + second * (n_rot / 2) : 2 * plane + second;
}

constexpr int angle_span = 64;  // positions that one turn of the queries serves: K rebuild, decode
// 64-channel blocks of K and of V that the decode kernel is compiled for.
LKV_HD constexpr int decode_blocks(int k_blocks, int v_blocks) {
    const int blocks = k_blocks > v_blocks ? k_blocks : v_blocks;
    return blocks <= 1 ? 1 : (blocks <= 2 ? 2 : 4);
}
LKV_HD inline int decode_blocks(const Problem& p) { return decode_blocks(p.k_blocks, p.v_blocks); }
// Rows in ggml's blocks of 32 channels, see StockRows.
LKV_HD constexpr bool is_stock_kind(int kind) {
    return kind == static_cast<int>(Format::q8_0) || kind == static_cast<int>(Format::q4_0);
}
constexpr int decode_static_bytes = 80;  // at most, beside DecodeLayout
constexpr int decode_rows = 8;           // query rows of a thread block: the columns of a tensor-core tile
constexpr int most_block_rows = 32;      // query rows where K is in blocks of tokens, for four thread blocks

// Wide latents in f16 leave the decode kernel no room for staged rows of K, which it keeps in registers anyway.
LKV_HD constexpr bool decode_reads_k_in_place(bool rebuild, int k_blocks, int kind) {
    return rebuild && k_blocks == 4 && kind == kind_f16_wide;
}

// From one position's angles to the next one's, each the cosines and sines of two planes, 8 bytes: those of four positions lie in
// different banks, which is what one half of a warp reads.
LKV_HD constexpr int angle_pitch(int tiles) { return 4 * tiles + (tiles % 2 == 0 ? 4 : 0); }

// Where RebuildTables lie, in this order. Sizes in bytes, multiples of 16.
struct RebuildLayout {
    int queries = 0;  // f32 [plane tiles][8][16]
    int extras = 0;   // with a bias or a norm: bias and norm weight, f32 [2][16·plane tiles]
    int angles = 0;   // f16 [span][angle_pitch][cosine, cosine, sine, sine]

    RebuildLayout() = default;
    LKV_HD RebuildLayout(const Problem& p, int plane_tiles)
        : queries(plane_tiles * 16 * decode_rows * 4),
          extras(p.k_extras != 0 ? 2 * 16 * plane_tiles * 4 : 0),
          angles(angle_span * 8 * angle_pitch(plane_tiles)) {}
    LKV_HD int total() const { return queries + extras + angles; }
};

struct DecodePlan {
    int32_t warps;    // of a thread block, `tile` slots each
    int32_t stages;   // tiles in flight
    int32_t k_pitch;  // bytes of a staged row, a multiple of 16; 0: K is read where it lies
    int32_t v_pitch;
    int32_t alike;  // 1: K and V of a group lie at the same bytes of rows of the same length, copied by 16 bytes
};

struct DecodeArgs : CutProblem, DecodePlan {
    const uint32_t* by_plane;  // rebuild: B as pack_k_b has it, dimensions in the order of plane_dim
};

// Shared memory of the decode kernel, in this order. Sizes in bytes, multiples of 16.
struct DecodeLayout {
    int groups;   // GroupTable of K and V per region
    int chunks;   // descriptors of K, then V, per region
    int queries;  // f16 [8][64·k_blocks]; K rebuild: 0
    int factor;   // K rebuild: f16 [64·k_blocks][16·plane tiles]
    RebuildLayout tables;
    int turned;  // K rebuild: a warp's queries, f16 [plane tiles][8][16]
    int own;  // of one warp: its queries, `stages` tiles of K and V, sequences and positions; K rebuild: these of one more
    int plane_tiles;  // K rebuild: tiles of 16 dimensions

    LKV_HD explicit DecodeLayout(const DecodeArgs& p) {
        groups = max_regions * 2 * static_cast<int>(sizeof(GroupTable));
        const int blocks = decode_blocks(p);
        chunks = p.n_regions * 8 * blocks * static_cast<int>(sizeof(Chunk));
        queries = p.rebuild != 0 ? 0 : decode_rows * 64 * blocks * 2;
        factor = turned = plane_tiles = 0;
        if (p.rebuild != 0) {
            plane_tiles = cuda::plane_tiles(p.head_dim, p.n_rot);
            factor = p.k_blocks * 64 * 16 * plane_tiles * 2;
            tables = RebuildLayout(p, plane_tiles);
            turned = plane_tiles * 16 * decode_rows * 2;
        }
        own = turned + p.tile * (p.stages * (p.k_pitch + p.v_pitch + 12) + (p.rebuild != 0 ? 12 : 0));
    }
    // bytes before the warps' own memory
    LKV_HD int common() const { return groups + chunks + queries + factor + tables.total(); }
    LKV_HD int total(const DecodeArgs& p) const {
        const int all = common() + p.warps * own;
        // the warps' sums meet where the tiles were
        const int of_item = p.n_tokens * p.unit * (p.n_head / p.n_kv);
        const int rows = of_item < decode_rows ? of_item : decode_rows;
        const int end = (p.warps + 1) * decode_rows * 8 + p.warps * rows * (64 * decode_blocks(p) + 8) * 4;
        return all > end ? all : end;
    }
};

cudaError_t launch_decode(const DecodeArgs& args, int items, cudaStream_t stream);
cudaError_t launch_decode_apart(const DecodeArgs& args, int items, cudaStream_t stream);
cudaError_t launch_decode_blocks(const DecodeArgs& args, int items, cudaStream_t stream);
cudaError_t launch_decode_rebuild(const DecodeArgs& args, int items, cudaStream_t stream);

}  // namespace lkv::cuda
