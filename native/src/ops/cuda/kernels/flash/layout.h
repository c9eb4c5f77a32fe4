// The flash kernel's plan: many query rows on full f16 rows, multiplied by warpgroups.
#pragma once

#include "ops/cuda/kernel.h"
#include "ops/cuda/problem.h"

namespace lkv::cuda {

constexpr int flash_rows = 128;  // query rows of a thread block, 64 a warpgroup
constexpr int flash_tile = 64;   // slots, of heads of up to 128 dimensions
constexpr int most_flash_head = 256;
constexpr int flash_stages = 6;  // tiles in shared memory: two in use, four on their way

// Slots of a tile: wider heads leave a thread's registers room for the scores of half as many.
LKV_HD constexpr int flash_slots(int head_dim) { return head_dim > 128 ? flash_tile / 2 : flash_tile; }

// Sums that pass from one launch to the next: in `out`, with their maxima and sums of weights in `ml`.
struct FlashCarry {
    float2* ml = nullptr;  // [n_tokens][n_head]
    int32_t before = 0;    // 1: an earlier launch left sums
    int32_t behind = 0;    // 1: a later one takes them, else results are final
};

struct FlashArgs : CutProblem {
    FlashCarry carry;
    int32_t in_tiles;  // 1: rows of one region that another kernel made lie as FlashTiles says, whole tiles of them
};

// Full rows of f16 made for this kernel: [tile][n_kv][head_dim / 8][slots of a tile] of 16 bytes each, which is how a tile lies in shared memory. Read
// by slots, every 16 bytes of a row go to another place there, and cross twice: a sector of 32 bytes each time.
struct FlashTiles {
    int64_t head;  // bytes from head to head
    int64_t tile;

    int slots;  // of a tile

    LKV_HD explicit constexpr FlashTiles(const Problem& p)
        : head(int64_t{2} * flash_slots(p.head_dim) * p.head_dim),
          tile(p.n_kv * head),
          slots(flash_slots(p.head_dim)) {}
    // Eight channels of a slot.
    LKV_HD constexpr int64_t at(int slot, int kv_head, int piece) const {
        return slot / slots * tile + kv_head * head + (piece * slots + slot % slots) * 16;
    }
};

// A tile in shared memory: K, V, sequences, positions. Eight channels of every slot follow each other, 16 bytes a slot, so that eight slots
// are a matrix of 128 bytes as warpgroups read it: with slots as columns for K, as rows for V.
struct FlashStage {
    int piece;  // bytes from eight channels to the next: lanes that copy a slot write to different banks
    int side;   // bytes of K, or of V
    int total;

    LKV_HD explicit constexpr FlashStage(int head_dim, bool in_tiles = false)
        : piece(16 * flash_slots(head_dim) + (in_tiles ? 0 : 16)),
          side(head_dim / 8 * piece),
          total(2 * side + 12 * flash_slots(head_dim)) {}
};

LKV_HD constexpr int flash_shared(int head_dim) { return flash_stages * FlashStage(head_dim).total; }

// Whether the kernel is for these rows, full ones of f16, with the parts it would take into p. For a device with products by warpgroups.
bool plan_flash(int capacity, const Device& device, CutProblem& p);
// heads: KV heads that are attended to, the first ones
cudaError_t launch_flash(const FlashArgs& args, int heads, cudaStream_t stream);

}  // namespace lkv::cuda
