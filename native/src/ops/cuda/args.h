// What the CUDA kernels are told: LatentAttnParams with every layout flattened into tables that live on the device.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "cache/row.h"
#include "ops/cuda/mla/plan.h"

namespace lkv::cuda {

constexpr int max_regions = 3;
constexpr int max_group_width = 2048;  // channels of one K or V group: 8 warps x 4 blocks x 64

// 16 channels of a row, and where their bytes lie from the group's first staged byte.
struct Chunk {
    uint8_t kind;     // ChunkKind
    uint8_t valid;    // channels that exist, 0 … 16; fewer than 16 only in f16 and f32 rows
    uint16_t codes;   // byte of the chunk's codes; in blocks: of its segment
    uint16_t affine;  // byte of its scale; in blocks: channels of its segment
    uint16_t
        odd;  // q4_0 and formats as it: the chunk is the second of a block; in blocks of tokens: its first channel in the segment
};

// The first channel of pair p of a decoded chunk; the second is two further. See dequant.cuh.
LKV_HD constexpr int pair_channel(int p) { return (p % 4 / 2) * 4 + p % 2 + p / 4 * 8; }

// Chunk kinds: the row formats by number (0 = not stored), and variants that the byte position allows.
enum ChunkKind : uint8_t { kind_none = 0, kind_f16_wide = 64, kind_f16_part = 65 };
constexpr int any_kind = -1;

// One group of one side in one region.
struct GroupTable {
    uint32_t first;       // first staged byte of the row, a multiple of a copy's bytes
    uint32_t bytes;       // staged bytes, likewise
    uint32_t chunks;      // its first Chunk; the group has as many as its side's blocks times 4
    uint8_t access_bits;  // bytes of one copy, as a power of two: 16 where every row starts on 16 bytes, else 4
    uint8_t across_bits;  // copies of a row, as a power of two, rounded up
    int16_t kind;         // what all its chunks are, if kernels have a path for it, else any_kind
};

struct RegionArgs {
    const uint8_t* k_rows;       // [n_slots, k_row_bytes]
    const uint8_t* v_rows;       // [n_slots, v_row_bytes]
    const int32_t* pos;          // [n_slots] -1 = free
    const uint64_t* seq;         // [n_slots]
    const GroupTable* k_groups;  // [n_kv / k_group]
    const GroupTable* v_groups;  // [n_kv / v_group]
    const Chunk* chunks;
    uint32_t k_row_bytes;
    uint32_t v_row_bytes;
    int32_t k_block;  // slots whose K is in one block (formats/channel.h), else 1
};

// How latents are expanded: from chunks of any format; from the MLA kernel's units, by single warps or by four at once; so, and multiplied
// with the queries where they are made (expand/score.h).
enum class ExpandBy : int32_t { chunks, units, warpgroup, scores };

// Results, or parts that are merged with another problem's; or results, and beside them the parts' maxima and sums of weights.
enum class Leaves : int32_t { results, parts, results_and_maxima };

// Steps of step_slots slots that hold tokens of a query token's sequence, a list a token: where a batch's tokens are of several sequences,
// or a cache holds others, a token may read its own alone (mla/).
struct OwnSteps {
    const int32_t* counts;  // [n_tokens]; null: tokens read all slots
    const int32_t* steps;   // [n_tokens, capacity], ascending
    int32_t capacity;
};
constexpr int step_slots = 32;

// One problem of latent_attn.h.
struct AttnArgs {
    const float* q;  // [n_tokens, n_head, q_width]
    float* out;      // [n_tokens, n_head, head_dim]
    const int32_t* q_pos;
    const int32_t* q_seq;
    const int32_t* n_slots;  // [n_regions], on the device: one captured graph serves a cache as it fills
    const float* alibi_slopes;
    OwnSteps own;  // offered to the plan; MlaPlan::apart says whether it is taken

    int32_t n_tokens;
    int32_t q_width;
    int32_t n_head;
    int32_t n_kv;
    int32_t head_dim;
    int32_t k_group;
    int32_t v_group;
    int32_t window;
    float scale;
    float softcap;  // of scaled products, 0: none

    // rebuild; k_b null: direct
    const uint32_t* k_b;             // f16 pairs in the order of mma fragments, see pack_k_b; dimensions in their order
    const uint32_t* k_b_planes;      // the same, dimensions in the order of plane_dim
    const uint32_t* k_b_cores;       // the same for the specialized kernel, see pack_k_b_cores
    const float* k_bias;             // [n_kv, head_dim]
    const float* k_norm;             // [head_dim]
    const uint64_t* phases;          // [n_rot/2] turns per position, 64-bit fraction
    const uint16_t* angles;          // of the specialized kernel, see pack_angles: of all_turned_tiles
    const uint16_t* rebuilt_angles;  // the same of rebuilt_tiles
    float k_norm_eps;
    float rope_mscale;
    int32_t n_rot;  // rotated dimensions, 0 without RoPE
    int32_t rope_neox;

    const uint16_t* k_b_rows;  // [n_kv, k_rank_max, head_dim] f16: for expand.cuh
    int32_t k_rank_max;
    const uint16_t* v_b;  // [n_kv, v_rank_max, head_dim] f16, or null
    int32_t v_rank_max;

    RegionArgs regions[max_regions];
    int32_t n_regions;

    // the plan
    const char* kernel;  // whose it is, for logs
    // KV heads of one work item: they share their V group and their K group (K rebuild by single warps or in prefill: 1)
    int32_t unit;
    int32_t tile;         // slots of a tile: 16, 32, 64 or 128
    int32_t stages;       // tiles in flight
    int32_t n_split;      // parts of the sequence, at most
    int32_t rehearsed;    // work items that a rehearsal launches, see rehearsed_items; 0: the real one, of all
    int32_t late_parts;   // 1: the last of n_split parts starts late, see Parts
    int32_t least_tiles;  // tiles that are worth a part
    int32_t rebuild;      // 1: K is rebuilt from its latent
    int32_t in_blocks;    // 1: K of a region is in blocks of tokens
    int32_t k_extras;     // 1: rebuild with a bias or a norm
    int32_t specialized;  // 1: the specialized kernel, of `unit` KV heads, `stages` tiles of latents ahead
    // of the specialized kernel, see absorb.cuh: positions on either side of one for which the slow planes of a key are absorbed into the
    // queries; 0: all planes are rebuilt
    int32_t absorbed_span;
    int32_t decode;  // warps of a thread block of the decode kernel, `tile` slots a warp; 0: another kernel
    int32_t kind;    // what every chunk of the decode kernel is, or any_kind
    int32_t wide;    // query rows of a thread block of the wide kernel, 16 or 32; 0: another kernel
    // 1: two thread blocks of a cluster share a part of the specialized kernel: each makes every second tile of latents for both
    int32_t pair;
    int32_t k_columns;  // of the wide kernel: slots of a tile times the warps side by side over K's channels
    int32_t prefill;    // warps side by side over V's channels of the prefill kernel, 1, 2 or 4; 0: another kernel
    int32_t buffers;    // of the prefill kernel: tiles that are made ahead
    int32_t k_blocks;   // 64-channel blocks of a stored K group
    int32_t v_blocks;
    int32_t
        k_pitch;  // bytes of a staged row, a multiple of 16, or of a whole row as stored; 0: K is read where it lies
    int32_t v_pitch;
    // of a prefill on rebuilt keys, see expand.cuh: slots that become full rows of f16 at once, a multiple of the tile; 0: another kernel
    int32_t expand;
    ExpandBy expand_by;
    int32_t score_blocks;  // thread blocks a head that make scores
    MlaPlan mla;
    int32_t context;      // slots of the tiles in use, at least; set before a launch
    RegionArgs expanded;  // these rows' tables
    Leaves leaves;
    int32_t beside;  // multiprocessors that another problem's kernel takes at the same time; set before a plan
    float* partial;  // [n_split, n_tokens, n_head, 64·v_blocks] sums, not normalised, and scratch, see partial_floats
    uint32_t*
        done;  // [merge_counters] 0 between launches: parts of a work item, or thread blocks of a merge, that have finished
    float* partial_ml;  // [n_split, n_tokens, n_head, 2] maximum (base 2) and sum
};

// What a plan depends on.
struct Device {
    int n_multiprocessors;
    int shared_bytes;  // that a thread block may have
    bool specialized;  // products by warpgroups: compute capability 9.0 and machine code for it
    bool pairs;        // clusters of two thread blocks: code for compute capability 9.0 or later
};

// One region's K and V rows of one layer, for writing. Segments live on the device.
struct RowTarget {
    int32_t full;  // 1: full rows beside latents in other regions
    uint8_t* k_rows;
    uint8_t* v_rows;
    const SegmentLayout* k_segments;
    const SegmentLayout* v_segments;
    int32_t k_row_bytes;
    int32_t v_row_bytes;
    int32_t n_k_segments;
    int32_t n_v_segments;
};

// K and V of a batch in one form.
struct StoreSource {
    const float* k;  // [n_tokens, k_stride]
    const float* v;  // [n_tokens, v_stride]
    int64_t k_stride;
    int64_t v_stride;
};

struct StoreArgs {
    StoreSource full;     // for regions of full rows
    StoreSource latents;  // for all others
    int32_t with_k;
    int32_t with_v;
    const int32_t* region;  // [n_tokens]
    const int32_t* slot;    // [n_tokens], -1: the token's rows go nowhere
    RowTarget targets[max_regions];
};

// Marks the slots of new tokens as used.
struct ClaimArgs {
    const int32_t* q_pos;   // [n_tokens]
    const int32_t* q_seq;   // [n_tokens]
    const int32_t* region;  // [n_tokens]
    const int32_t* slot;    // [n_tokens], -1: none
    int32_t* pos[max_regions];
    uint64_t* seq[max_regions];
    int32_t seen;  // 0: they hold nothing yet
};

// Finds OwnSteps of a region.
struct FindStepsArgs {
    const int32_t* q_seq;    // [n_tokens]
    const uint64_t* seq;     // [n_slots]
    const int32_t* n_slots;  // on the device
    int32_t* counts;
    int32_t* steps;
    int32_t capacity;
};

// K of single rows into blocks of 32 tokens: the segments that are stored so, no others.
struct BlockArgs {
    const uint8_t* rows;
    int64_t row_bytes;
    const SegmentLayout* segments;  // of `rows`; null: these are f32, of all channels
    int32_t n_segments;
    const int32_t* from_slot;  // [n_rows] of `rows`; null: 0, 1, …
    RowTarget to;
    const int32_t* to_slot;  // [n_rows], 32 of one block after 32 of another
};

struct MoveArgs {
    RowTarget from;
    RowTarget to;
    const int32_t* from_slot;  // [n_rows]
    const int32_t* to_slot;    // [n_rows]
    int32_t k_width;           // channels of the uncompressed vector
    int32_t v_width;
};

}  // namespace lkv::cuda
