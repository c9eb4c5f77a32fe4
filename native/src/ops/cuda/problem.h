// One problem of latent_attn.h as it lies on the device, with every row layout flattened into tables. No plan of any kernel is in it.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "cache/row.h"

namespace lkv::cuda {

constexpr int max_regions = 3;
constexpr int most_head_dim = 512;     // of any kernel, and of what is merged
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
    const uint8_t* k_rows;  // of slot 0; the others by row_offset
    const uint8_t* v_rows;
    const int32_t* pos;          // [n_slots] -1 = free
    const uint64_t* seq;         // [n_slots]
    const GroupTable* k_groups;  // [n_kv / k_group]
    const GroupTable* v_groups;  // [n_kv / v_group]
    const Chunk* chunks;
    int64_t k_page;  // bytes from a page of slots to the next one
    int64_t v_page;
    uint32_t k_row_bytes;
    uint32_t v_row_bytes;
    int32_t k_block;  // slots whose K is in one block (formats/channel.h), else 1

    // Rows of a slot, and behind it those of its page.
    LKV_HD const uint8_t* k_row(int slot) const { return k_rows + row_offset(slot, k_page, k_row_bytes); }
    LKV_HD const uint8_t* v_row(int slot) const { return v_rows + row_offset(slot, v_page, v_row_bytes); }
};

// Steps of step_slots slots that hold tokens of a query token's sequence, a list a token: where a batch's tokens are of several sequences,
// or a cache holds others, a token may read its own alone. Regions follow one another, each ascending; a problem may have a part of a list.
struct OwnSteps {
    const int32_t* begins;  // [n_tokens]; null: 0
    const int32_t* ends;    // [n_tokens]; null: tokens read all slots
    const int32_t* steps;   // [n_tokens, capacity], the region above step_bits
    int32_t capacity;
};
constexpr int step_bits = 28;
// A step's region in a problem, which has all regions of the list or the last one alone; and its first slot.
LKV_HD constexpr int region_of_step(int step, int n_regions) {
    return step >> step_bits < n_regions ? step >> step_bits : n_regions - 1;
}
LKV_HD constexpr int slot_of_step(int step) { return (step & ((1 << step_bits) - 1)) * step_slots; }

struct Problem {
    const float* q;  // [n_tokens, n_head, q_width]
    float* out;      // [n_tokens, n_head, head_dim]
    const int32_t* q_pos;
    const int32_t* q_seq;
    const int32_t* n_slots;  // [n_regions], on the device: one captured graph serves a cache as it fills
    const float* alibi_slopes;
    OwnSteps own;  // offered; a kernel's plan says whether it takes them

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

    // What makes a key of its latent. A kernel that wants k_b in an order of its own packs it (Kernel::pack_keys).
    int32_t rebuild;      // 1: K is rebuilt from its latent
    int32_t k_extras;     // 1: rebuild with a bias or a norm
    const uint16_t* k_b;  // f16 [n_kv, k_rank_max, head_dim], or null
    int32_t k_rank_max;
    const float* k_bias;     // [n_kv, head_dim]
    const float* k_norm;     // [head_dim]
    const uint64_t* phases;  // [n_rot/2] turns per position, 64-bit fraction
    float k_norm_eps;
    float rope_mscale;
    int32_t n_rot;  // rotated dimensions, 0 without RoPE
    int32_t rope_neox;

    const uint16_t* v_b;  // f16 [n_kv, v_rank_max, head_dim], or null
    int32_t v_rank_max;
    int32_t
        v_hadamard;  // results leave times a Hadamard matrix of so many channels, with which V was stored, at most 64; 0: as they are

    RegionArgs regions[max_regions];
    int32_t n_regions;
    int32_t k_blocks;  // 64-channel blocks of the widest stored K group
    int32_t v_blocks;
    int32_t kind;       // what all chunks are, if kernels have a path for it, else any_kind
    int32_t in_blocks;  // 1: K of a region is in blocks of tokens
    int32_t scaled;     // 1: rows of a region have scales of groups
    RegionArgs whole;   // tables of full f16 rows of whole heads, for kernels that make such rows
};

// Slots in use of a region are counted on the host in multiples of this (Plan::context).
constexpr int context_step = 64;

LKV_HD constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// How stored rows lie in a tile in shared memory.

// Rows that are copied whole and start on no 16 bytes lie in tiles as they were stored: their first slots do start on 16 bytes,
// and 4 bytes at a time would be four times the copies.
LKV_HD inline bool copied_whole(uint32_t row_bytes, const GroupTable& group) {
    return group.access_bits == 2 && group.bytes == row_bytes;
}

// A staged row is a multiple of 16 bytes, an odd one so that eight rows start in different banks.
LKV_HD constexpr int pitch_of(int bytes) { return round_up(bytes > 16 ? bytes : 16, 16) | 16; }

// Warps side by side over the channel blocks; the others share out the slots.
LKV_HD constexpr int channel_warps(int blocks) { return blocks <= 1 ? 1 : (blocks <= 2 ? 2 : (blocks <= 4 ? 4 : 8)); }

}  // namespace lkv::cuda
