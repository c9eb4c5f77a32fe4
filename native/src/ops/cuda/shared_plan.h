// How the attention kernel lays out its shared memory; read by the kernel and by the plan that chooses tiles for it.
#pragma once

#include <cuda_runtime_api.h>

#include <numeric>

#include "base/half.h"
#include "cache/formats.h"
#include "ops/cuda/args.h"

namespace lkv::cuda {

constexpr int n_threads = 256;
constexpr int n_warps = n_threads / 32;
LKV_HD constexpr int max_tile(int rows) { return rows == 16 ? 128 : 64; }  // slots, for that many query rows

LKV_HD constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Rows that are copied whole and start on no 16 bytes lie in tiles as they were stored: their first slots do start on 16 bytes,
// and 4 bytes at a time would be four times the copies.
LKV_HD inline bool copied_whole(uint32_t row_bytes, const GroupTable& group) {
    return group.access_bits == 2 && group.bytes == row_bytes;
}

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
    LKV_HD int total(const AttnArgs& p, int rows) const {
        const int all = p.stages * stage + chunks + planes + weights + scales + rebuilt + raw;
        const int merge = rows * 64 * p.v_blocks * 4 + chunks;
        return all > merge ? all : merge;
    }
};

constexpr int most_parts = 132;  // of the sequence

constexpr int n_wide_threads = 512;
constexpr int n_wide_warps = n_wide_threads / 32;
constexpr int max_wide_rows = 32;  // query rows of a thread block
constexpr int max_wide_tile = 128;
constexpr int max_wide_stages = 2;
constexpr int least_wide_tile = 32;    // slots of a tile of the wide kernel, where the plan has more
constexpr int enough_wide_parts = 64;  // below so many parts its tiles shrink: a part is one thread block

// Warps of the wide kernel side by side over V's channel blocks; the others share out the slots.
LKV_HD constexpr int wide_channel_warps(int blocks) { return blocks <= 8 ? channel_warps(blocks) : n_wide_warps; }

// Slots of a tile times the warps side by side over K's channels, AttnArgs::k_columns: sixteen warps are at work, or fewer where
// their partial scores would leave a tile no room.
constexpr int most_k_columns = 16 * n_wide_warps;
LKV_HD constexpr int least_k_columns(int tile) { return tile >= 64 ? most_k_columns : 4 * tile; }

constexpr int wide_fixed = 1024;                 // bytes of the kernel's own variables, at most
constexpr int wide_marks = max_wide_stages + 2;  // tiles whose sequences and positions are kept

// A staged row is a multiple of 16 bytes, an odd one so that eight rows start in different banks.
LKV_HD constexpr int pitch_of(int bytes) { return round_up(bytes > 16 ? bytes : 16, 16) | 16; }

// Rows of K or V of one region, for the wide kernel's copies.
struct alignas(16) WideSource {
    const uint8_t* rows;  // slot 0; copies begin at group.first
    const uint64_t* seq;
    const int32_t* pos;
    uint32_t row_bytes;
    int32_t n_slots;
    int32_t tiles_before;
    int32_t pitch;  // bytes from row to row of a tile
    int32_t whole;  // 1: rows lie in a tile as in memory
    GroupTable group;
};

// What softmax knows of a query row. pos: -1 where there is none
struct alignas(16) WideRow {
    unsigned long long seq;
    int32_t pos;
    float slope;
};

// Shared memory of the wide kernel: where each part begins, in bytes, multiples of 16.
struct WidePlan {
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

    LKV_HD WidePlan(const AttnArgs& p, int rows) {
        const int tile = p.tile;
        chunks = 2 * p.n_regions * static_cast<int>(sizeof(WideSource));
        queries = round_up(chunks + p.n_regions * 4 * (p.k_blocks + p.v_blocks) * static_cast<int>(sizeof(Chunk)), 16);
        k_stages = queries + p.k_blocks * 64 * rows * 2;
        v_stages = k_stages + p.stages * tile * p.k_pitch;
        marks = v_stages + p.stages * tile * p.v_pitch;
        planes = marks + wide_marks * tile * 12;
        // smaller tiles, see Parts, have more planes
        const int least = tile < least_wide_tile ? tile : least_wide_tile;
        weights = planes + rows * 4 * (p.k_columns + p.k_columns / least * plane_pad);
        scales = weights + 2 * rows * (tile + 8) * 2;
        total = scales + 2 * rows * 4;
        // the sums of the warps that share channels meet where the tiles were, but those that a warp keeps
        const int side = wide_channel_warps(p.v_blocks);
        const int merge = k_stages + (n_wide_warps / side - 1) * rows * 64 * side * 4;
        total = total > merge ? total : merge;
    }
};

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

// The prefill kernel: 128 / wc query rows a thread block, wc warps side by side over V's channels (AttnArgs::prefill).
constexpr int n_maker_warps = 4;                            // wc = 1: they make tiles for the other eight
constexpr int prefill_channels[] = {0, 128, 512, 0, 1024};  // of V, and wc = 1: of K
LKV_HD constexpr int prefill_threads(int wc) { return n_threads + (wc == 1 ? 32 * n_maker_warps : 0); }
LKV_HD constexpr int prefill_tile(int wc) { return wc == 4 ? 32 : 64; }  // slots

constexpr int expand_tile = prefill_tile(1);  // slots, of a chunk's tiles
constexpr int expand_slots = 128;             // that a thread block expands: two tiles, of one region each

// Behind the parts' sums: what a chunk of the context is expanded to. Bytes from the first, multiples of 16.
struct ExpandedRows {
    int64_t k = 0;  // f16 [expand][n_kv][head_dim]
    int64_t v;
    int64_t seq;      // u64 [expand], 0: no token
    int64_t pos;      // i32 [expand]
    int64_t n_slots;  // i32 [4], the first
    int64_t ml;       // f32 [n_tokens][n_head][2] of the chunks before: maximum and sum; their sums are in `out`
    int64_t total;

    LKV_HD explicit ExpandedRows(const AttnArgs& p) {
        v = int64_t{p.expand} * p.n_kv * p.head_dim * 2;
        seq = 2 * v;
        pos = seq + int64_t{p.expand} * 8;
        n_slots = pos + int64_t{p.expand} * 4;
        ml = n_slots + 16;
        total = ml + (int64_t{p.n_tokens} * p.n_head * 8 + 15) / 16 * 16;
    }
};

enum Seen : int { seen_by_none = 0, seen_by_some = 1, seen_by_all = 2 };

// What the query rows of a thread block see between them.
struct alignas(16) PrefillSight {
    int first_pos;
    int last_pos;
    unsigned long long seq;
};

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
struct PrefillPlan {
    int k16;           // blocks of 16 channels of K as it is multiplied, an even number
    int k_tile_pitch;  // bytes, an odd multiple of 16: eight rows start in different banks
    int v_tile_pitch;
    int chunks;  // descriptors of K, then V, per region; then, from the bytes below, ends of runs and GroupTables
    int run_ends;
    int groups;
    int meta;     // PrefillSight, PrefillRegion [n_regions], PrefillMeta [2]
    int queries;  // wc > 1: f16 [rows][k_tile_pitch]
    int weights;  // wc > 1: f16 [rows][tile + 8]
    int maxima;   // wc > 1: f32 [rows][wc]
    int tile;     // f16 K and V side by side; wc > 1: one after the other in the same place
    int stage;    // one tile as stored: K rows, V rows, sequences, positions

    LKV_HD explicit PrefillPlan(const AttnArgs& p) {
        const int wc = p.prefill;
        const int slots = prefill_tile(wc);
        k16 = 4 * p.k_blocks;
        const int deep = wc == 1 ? prefill_depth(k16, p.v_blocks) : 0;
        k_tile_pitch = 32 * (wc == 1 ? deep : k16) + 16;
        v_tile_pitch = 32 * (wc == 1 ? deep : 4 * p.v_blocks) + 16;
        const int n_chunks = p.n_regions * 4 * (p.k_blocks + p.v_blocks);
        run_ends = n_chunks * static_cast<int>(sizeof(Chunk));
        groups = round_up(run_ends + n_chunks, 16);
        chunks = groups + max_regions * 2 * static_cast<int>(sizeof(GroupTable));
        meta = static_cast<int>(sizeof(PrefillSight) + max_regions * sizeof(PrefillRegion) + 2 * sizeof(PrefillMeta));
        const int rows = 128 / wc;
        queries = wc == 1 ? 0 : rows * k_tile_pitch;
        weights = wc == 1 ? 0 : rows * (2 * slots + 16);
        maxima = wc == 1 ? 0 : rows * wc * 4;
        const int wider = k_tile_pitch > v_tile_pitch ? k_tile_pitch : v_tile_pitch;
        tile = wc == 1 ? slots * (k_tile_pitch + v_tile_pitch) : slots * wider;
        stage = slots * (p.k_pitch + p.v_pitch + 12);
    }
    LKV_HD int total(const AttnArgs& p) const {
        // a step is read ahead, past the last row
        return chunks + meta + queries + weights + maxima + p.buffers * tile + p.stages * stage + 128;
    }
    // wc = 1: blocks of 16 channels of K and of V that the kernel is compiled for
    LKV_HD static constexpr int prefill_depth(int k16, int v_blocks) { return k16 <= 4 && v_blocks <= 1 ? 4 : 8; }
};

// Work items of a rehearsal: all of them where the kernel multiplies with B_v, which comes into the L2 cache so (8B, rotated 64, q4:
// 350 tokens/s at depth 0 with one head of eight, 361 to 363 with all). Elsewhere one group of K and V, above all of the specialized
// kernel, whose thread blocks take a whole multiprocessor each.
inline int rehearsed_items(const AttnArgs& p) {
    if (p.specialized == 0 && p.mla.rows == 0 && p.v_b != nullptr) return p.n_kv / p.unit;
    return std::lcm(p.unit, std::lcm(p.k_group, p.v_group)) / p.unit;
}
// Parts of a rehearsal, which has one slot a region; of the wide kernel half the query rows each.
inline int rehearsed_parts(const AttnArgs& p) { return p.mla.rows != 0 ? p.n_regions : 2 * p.n_regions; }
inline int launched_items(const AttnArgs& p) { return p.rehearsed != 0 ? p.rehearsed : p.n_kv / p.unit; }

// Wider latents V are merged and multiplied with B_v by more than one thread block a head.
constexpr int widest_merged_by_one = 128;
constexpr int angle_span = 64;  // positions that one turn of the queries serves: K rebuild, decode
// Where slow planes of latents of 256 channels are absorbed there is room for twice as many, two tiles of the specialized kernel.
constexpr int wide_angle_span = 128;
// 64-channel blocks of K and of V that the decode kernel is compiled for.
LKV_HD constexpr int decode_blocks(int k_blocks, int v_blocks) {
    const int blocks = k_blocks > v_blocks ? k_blocks : v_blocks;
    return blocks <= 1 ? 1 : (blocks <= 2 ? 2 : 4);
}
LKV_HD inline int decode_blocks(const AttnArgs& p) { return decode_blocks(p.k_blocks, p.v_blocks); }
// Whether a decode kernel leaves its parts to combine_wide: one thread block an item would read all of B_v, 3.7 us of 128 channels
// for two heads at any depth. decode.cuh's kernels for 64 channels multiply themselves: a whole decode step gains 2.5 % from
// one more launch at depth 4096 and loses as much at depth 0.
LKV_HD inline bool merges_apart(const AttnArgs& p) {
    return p.v_b != nullptr && (p.specialized != 0 || (p.decode != 0 && decode_blocks(p) > 1));
}
constexpr int decode_static_bytes = 64;  // at most, beside DecodePlan
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
    LKV_HD RebuildLayout(const AttnArgs& p, int plane_tiles, int turned_tiles, int unit, int span = angle_span)
        : queries(plane_tiles * 16 * decode_rows * 4),
          extras(p.k_extras != 0 ? (unit + 1) * 16 * plane_tiles * 4 : 0),
          angles(span * 8 * angle_pitch(turned_tiles)) {}
    LKV_HD int total() const { return queries + extras + angles; }
};

// What a decode kernel needs at the end of a part: `maxima` bytes and `slices` times the sums of all rows, then the parts' weights and
// merged sums (finish.cuh).
LKV_HD inline int end_part_bytes(const AttnArgs& p, int maxima, int slices) {
    const int rows = p.n_tokens * p.unit * (p.n_head / p.n_kv);
    const int pitch = (64 * decode_blocks(p) + 8) * 4;
    const int merge = maxima + slices * rows * pitch;
    const int parts = round_up(rows * p.n_split, 4) * 4 + rows * pitch;
    return merge > parts ? merge : parts;
}

// Shared memory of the decode kernel, in this order. Sizes in bytes, multiples of 16.
struct DecodePlan {
    int groups;   // GroupTable of K and V per region
    int chunks;   // descriptors of K, then V, per region
    int queries;  // f16 [8][64·k_blocks]; K rebuild: 0
    int factor;   // K rebuild: f16 [64·k_blocks][16·plane tiles]
    RebuildLayout tables;
    int turned;  // K rebuild: a warp's queries, f16 [plane tiles][8][16]
    int own;  // of one warp: its queries, `stages` tiles of K and V, sequences and positions; K rebuild: these of one more
    int plane_tiles;  // K rebuild: tiles of 16 dimensions

    LKV_HD explicit DecodePlan(const AttnArgs& p) {
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
    LKV_HD int total(const AttnArgs& p) const {
        const int all = common() + p.decode * own;
        const int end = end_part_bytes(p, (p.decode + 1) * decode_rows * 8, p.decode);
        return all > end ? all : end;
    }
};

// The specialized kernel: warps with roles, four by four.
constexpr int n_making_warps = 4;
constexpr int n_summing_warps = 4;
// Of these as many take a tile as there are 64-channel blocks, 1, 2 or 4; the others the next tiles.
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
// Of thread blocks that work in pairs each sums half of V's channels for both items, its own and the other's, whose weights the other's
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

// Shared memory of the specialized kernel, in this order. Sizes in bytes, multiples of 16; `factor`, which the copy engine fills,
// first.
struct SpecializedPlan {
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

    LKV_HD explicit SpecializedPlan(const AttnArgs& p) : blocks(decode_blocks(p)) {
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
    LKV_HD int total(const AttnArgs& p) const {
        const int all = factor + latents + weights + groups + chunks + tables.total() +
                        note_buffers(blocks, p.unit, p.absorbed_span != 0) * note;
        const int end = end_part_bytes(p, 1024, tiles_at_once(1));
        return all > end ? all : end;
    }
};

}  // namespace lkv::cuda
