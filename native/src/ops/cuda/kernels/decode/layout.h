// The decode kernel's plan, and how it lays out its shared memory. The tables of rebuilt keys are specialized/'s too.
#pragma once

#include "ops/cuda/kernel.h"
#include "ops/cuda/rows/staged.h"

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
// Whether the decode kernel leaves its parts to softmax/combine.cu: one thread block an item would read all of B_v, 3.7 us of 128 channels
// for two heads at any depth. Kernels for 64 channels multiply themselves: a whole decode step gains 2.5 % from one more launch at depth
// 4096 and loses as much at depth 0.
LKV_HD inline bool merges_apart(const Problem& p) { return p.v_b != nullptr && decode_blocks(p) > 1; }
constexpr int decode_static_bytes = 64;  // at most, beside DecodeLayout
constexpr int decode_rows = 8;           // query rows of the decode kernel: the columns of a tensor-core tile

// Wide latents in f16 leave the decode kernel no room for staged rows of K, which it keeps in registers anyway.
LKV_HD constexpr bool decode_reads_k_in_place(bool rebuild, int k_blocks, int kind) {
    return rebuild && k_blocks == 4 && kind == kind_f16_wide;
}

// From one position's angles to the next one's, each the cosines and sines of two planes, 8 bytes: those of four positions lie in
// different banks, which is what one half of a warp reads.
LKV_HD constexpr int angle_pitch(int turned_tiles) { return 4 * turned_tiles + (turned_tiles % 2 == 0 ? 4 : 0); }

// Where RebuildTables lie, in this order. Sizes in bytes, multiples of 16.
struct RebuildLayout {
    int queries = 0;  // f32 [plane tiles][8][16]
    int extras = 0;   // with a bias or a norm: bias and norm weight, f32 [unit + 1][16·plane tiles]
    int angles = 0;   // f16 [span][angle_pitch][cosine, cosine, sine, sine]

    RebuildLayout() = default;
    // turned_tiles: of the plane tiles, those whose keys are turned; unit: KV heads of a thread block; span: positions
    LKV_HD RebuildLayout(const Problem& p, int plane_tiles, int turned_tiles, int unit, int span = angle_span)
        : queries(plane_tiles * 16 * decode_rows * 4),
          extras(p.k_extras != 0 ? (unit + 1) * 16 * plane_tiles * 4 : 0),
          angles(span * 8 * angle_pitch(turned_tiles)) {}
    LKV_HD int total() const { return queries + extras + angles; }
};

// What a decode kernel needs at the end of a part: `maxima` bytes and `slices` times the sums of all rows, then the parts' weights and
// merged sums (finish.cuh).
LKV_HD inline int end_part_bytes(const CutProblem& p, int maxima, int slices) {
    const int rows = p.n_tokens * p.unit * (p.n_head / p.n_kv);
    const int pitch = (64 * decode_blocks(p) + 8) * 4;
    const int merge = maxima + slices * rows * pitch;
    const int parts = round_up(rows * p.n_split, 4) * 4 + rows * pitch;
    return merge > parts ? merge : parts;
}

struct DecodePlan {
    int32_t warps;    // of a thread block, `tile` slots each
    int32_t stages;   // tiles in flight
    int32_t k_pitch;  // bytes of a staged row, a multiple of 16; 0: K is read where it lies
    int32_t v_pitch;
};

struct DecodeArgs : CutProblem, DecodePlan {
    const uint32_t* by_plane;  // rebuild: B as pack_k_b has it, dimensions in the order of plane_dim
};

// What every chunk is to kernels whose blocks of 64 channels come in ones, twos and fours: what a group has less is no chunk of its kind.
int decode_kind(const Problem& p);
// Parts of the sequence. resident: thread blocks that the device runs at once
int decode_parts(const CutProblem& p, int capacity, int resident);
// A head's dimensions as plane_dim orders them (-1: none).
std::vector<int> dims_by_plane(int head_dim, int n_rot, bool neox);

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
            tables = RebuildLayout(p, plane_tiles, plane_tiles, 1);
            turned = plane_tiles * 16 * decode_rows * 2;
        }
        own = turned + p.tile * (p.stages * (p.k_pitch + p.v_pitch + 12) + (p.rebuild != 0 ? 12 : 0));
    }
    // bytes before the warps' own memory
    LKV_HD int common() const { return groups + chunks + queries + factor + tables.total(); }
    LKV_HD int total(const DecodeArgs& p) const {
        const int all = common() + p.warps * own;
        const int end = end_part_bytes(p, (p.warps + 1) * decode_rows * 8, p.warps);
        return all > end ? all : end;
    }
};

cudaError_t launch_decode(const DecodeArgs& args, int items, cudaStream_t stream);
cudaError_t launch_decode_rebuild(const DecodeArgs& args, int items, cudaStream_t stream);

}  // namespace lkv::cuda
