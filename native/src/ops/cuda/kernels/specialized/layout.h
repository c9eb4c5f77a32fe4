// The specialized kernel's plan, and how it lays out its shared memory.
#pragma once

#include "ops/cuda/kernels/decode/layout.h"

namespace lkv::cuda {

// Where slow planes of latents of 256 channels are absorbed there is room for twice as many, two tiles.
constexpr int wide_angle_span = 128;

// The specialized kernel: warps with roles, four by four.
constexpr int n_making_warps = 4;
constexpr int n_summing_warps = 4;
// A tile takes as many of these as there are 64-channel blocks, 1, 2 or 4; the others take the next tiles.
LKV_HD constexpr int tiles_at_once(int blocks) { return n_making_warps / blocks; }
constexpr int n_scoring_warps = 8;
constexpr int specialized_threads = 32 * (n_making_warps + n_summing_warps + n_scoring_warps);
constexpr int specialized_tile = 64;   // slots: the rows of a product by a warpgroup
constexpr int max_latent_buffers = 8;  // a power of two
constexpr int used_masks =
    16;  // of tiles, so many that the warps that sum are done with one before it is written again
constexpr int weight_buffer_bits = 2;
constexpr int n_weight_buffers = 1 << weight_buffer_bits;
constexpr int specialized_fixed = 2048;  // bytes of the kernel's own variables, at most

// A tile's softmax weights, from the warps that score to those that sum.
struct alignas(16) TileWeights {
    // Of 16 slots, as an operand of mma: lane 4g + c has f16 weights of query row g, slots 2c and 2c + 1 and those eight further,
    // relative to 2^base.
    uint2 of[specialized_tile / 16][32];
    float base[specialized_tile / 16][decode_rows];  // of 16 slots, those of one warp
};
// Thread blocks that work in pairs each sum half of V's channels for both items, their own and the other's, whose weights the other's
// warps pass on. A warp does so behind its last use of the ones before, so that two buffers are enough.
LKV_HD constexpr int summed_items(bool paired) { return paired ? 2 : 1; }
constexpr int passed_buffer_bits = 1;
constexpr int n_passed_buffers = 1 << passed_buffer_bits;

// Tiles of latents and of notes that there is room for. Who makes or reads a tile finds its next ones in the same buffers, which
// is what tells two uses of a buffer apart. Scorers look two tiles ahead; those of one KV head work at different tiles.
// Two thread blocks of a pair make every second one.
LKV_HD constexpr int least_latent_buffers(int blocks, int unit, bool paired) {
    const int made = tiles_at_once(blocks) * (paired ? 2 : 1);
    return made > 2 / unit ? made : 2 / unit;
}
// Of 256 channels for two heads, shared memory has room for two where all planes are turned.
LKV_HD constexpr int note_buffers(int blocks, int unit, bool absorbs) {
    return blocks == 1 ? max_latent_buffers : (blocks == 4 && unit == 2 && !absorbs ? 2 : 4);
}

// What the warps that score need to know of a tile beside its latents; behind it the queries turned back by `lowest` positions, f16
// [turned tiles][8][16].
struct alignas(16) TileNotes {
    uint64_t seq[specialized_tile];  // 0: no token
    int32_t past[specialized_tile];  // positions behind `lowest`, 0 without a token
    int32_t lowest;                  // position of a token, no later than any; 0 without any
    int32_t whole;                   // 1: every query sees every slot
    int32_t turned;                  // the buffer of notes that has the queries turned
};

// Whether K and V of these blocks are the specialized kernel's.
LKV_HD constexpr bool has_specialized_shape(int k_blocks, int v_blocks) { return k_blocks <= 4 && v_blocks <= 4; }

constexpr int product_tiles = 8;  // tiles of 16 dimensions that a product by a warpgroup makes
// Where slow planes are absorbed: tiles that are rebuilt, of product_tiles, and how many sets of absorbed columns lie in the next one's
// place. Two warpgroups that score the same head absorb for different tiles; of latents of 256 channels they score different ones.
constexpr int rebuilt_tiles = 5;
LKV_HD constexpr int column_sets(int blocks) { return blocks == 4 ? 1 : 2; }
// Where a set is: blocks of eight dimensions. Column r has a of query row r, column r ^ 4 its b.
LKV_HD constexpr int absorbed_block(int set) { return 2 * rebuilt_tiles + set; }
LKV_HD constexpr int specialized_angle_span(int blocks, bool absorbs) {
    return blocks == 4 && absorbs ? wide_angle_span : angle_span;
}
// Bytes of 16 channels of B in shared memory, of 128 dimensions or those that are rebuilt and the columns.
LKV_HD constexpr int factor_step(int blocks, bool absorbs) {
    return 256 * (absorbs ? absorbed_block(column_sets(blocks)) : 2 * product_tiles);
}

// Tiles of 16 dimensions whose keys are turned where none is absorbed.
LKV_HD inline int all_turned_tiles(int head_dim, int n_rot) {
    return round_up(plane_tiles(head_dim, n_rot), product_tiles / 2);
}

struct SpecializedPlan {
    int32_t stages;  // tiles of latents ahead
    // See absorb.cuh: positions on either side of one for which the slow planes of a key are absorbed into the queries; 0: all planes are
    // rebuilt
    int32_t absorbed_span;
    int32_t pair;  // 1: two thread blocks of a cluster share a part: each makes every second tile of latents for both
};

struct SpecializedArgs : CutProblem, SpecializedPlan {
    const uint32_t* k_b_cores;       // see pack_k_b_cores
    const uint16_t* angles;          // see pack_angles: of all_turned_tiles
    const uint16_t* rebuilt_angles;  // the same of rebuilt_tiles
};

// Shared memory of the specialized kernel, in this order. Sizes in bytes, multiples of 16; `factor`, which the copy engine fills,
// first.
struct SpecializedLayout {
    int plane_tiles;   // tiles of 16 dimensions, a multiple of product_tiles
    int turned_tiles;  // those of them whose keys are turned
    int blocks;        // 64-channel blocks that the kernel is compiled for
    int factor;        // f16 [unit][batches of 128 dimensions][4·blocks][factor_step]
    int latents;       // f16 [buffers][tile][64·blocks]
    int weights;       // TileWeights [n_weight_buffers], of a pair [n_passed_buffers] behind them
    int groups;        // GroupTable of K and V per region
    int chunks;        // descriptors of K, then V, per region
    RebuildLayout tables;
    int note;  // TileNotes [note_buffers], with what is behind them

    LKV_HD explicit SpecializedLayout(const SpecializedArgs& p) : blocks(decode_blocks(p)) {
        const int tiles = cuda::plane_tiles(p.head_dim, p.n_rot);
        plane_tiles = round_up(tiles, product_tiles);
        const bool absorbs = p.absorbed_span != 0;
        turned_tiles = absorbs ? rebuilt_tiles : all_turned_tiles(p.head_dim, p.n_rot);
        factor = p.unit * plane_tiles / product_tiles * 4 * blocks * factor_step(blocks, absorbs);
        latents = p.stages * blocks * 64 * specialized_tile * 2;
        weights = (n_weight_buffers + (p.pair != 0 ? n_passed_buffers : 0)) * static_cast<int>(sizeof(TileWeights));
        groups = max_regions * 2 * static_cast<int>(sizeof(GroupTable));
        chunks = p.n_regions * 8 * blocks * static_cast<int>(sizeof(Chunk));
        tables = RebuildLayout(p, plane_tiles, turned_tiles, p.unit, specialized_angle_span(blocks, absorbs));
        note = static_cast<int>(sizeof(TileNotes)) + turned_tiles * 16 * decode_rows * 2;
    }
    LKV_HD int total(const SpecializedArgs& p) const {
        const int all = factor + latents + weights + groups + chunks + tables.total() +
                        note_buffers(blocks, p.unit, p.absorbed_span != 0) * note;
        const int end = end_part_bytes(p, 1024, tiles_at_once(1));
        return all > end ? all : end;
    }
};

cudaError_t launch_specialized(const Plan& plan, cudaStream_t stream);
std::vector<uint32_t> pack_specialized(const KeyFactor& factor, const Device& device);
// Where the packed words of the angles begin, behind the cores.
struct PackedWords {
    size_t cores;  // words
    size_t angles, rebuilt_angles;
    PackedWords(int n_kv, int head_dim, int n_rot, int blocks);
};

}  // namespace lkv::cuda
