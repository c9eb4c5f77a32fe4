// The flash kernel's plan: many query rows on full f16 rows, multiplied by warpgroups.
#pragma once

#include "ops/cuda/kernel.h"
#include "ops/cuda/problem.h"

namespace lkv::cuda {

constexpr int flash_rows = 128;  // query rows of a thread block, 64 a warpgroup
constexpr int flash_tile = 64;   // slots
constexpr int flash_stages = 6;  // tiles in shared memory: two in use, four on their way

// Sums that pass from one launch to the next: in `out`, with their maxima and sums of weights in `ml`.
struct FlashCarry {
    float2* ml = nullptr;  // [n_tokens][n_head]
    int32_t before = 0;    // 1: an earlier launch left sums
    int32_t behind = 0;    // 1: a later one takes them, else results are final
};

struct FlashArgs : CutProblem {
    FlashCarry carry;
};

// A tile in shared memory: K, V, sequences, positions. Eight channels of every slot follow each other, 16 bytes a slot, so that eight slots
// are a matrix of 128 bytes as warpgroups read it: with slots as columns for K, as rows for V.
struct FlashStage {
    int piece;  // bytes from eight channels to the next: lanes that copy a slot write to different banks
    int side;   // bytes of K, or of V
    int total;

    LKV_HD explicit constexpr FlashStage(int head_dim)
        : piece(16 * flash_tile + 16), side(head_dim / 8 * piece), total(2 * side + 12 * flash_tile) {}
};

LKV_HD constexpr int flash_shared(int head_dim) { return flash_stages * FlashStage(head_dim).total; }

// Whether the kernel is for these rows, full ones of f16, with the parts it would take into p. For a device with products by warpgroups.
bool plan_flash(int capacity, const Device& device, CutProblem& p);
cudaError_t launch_flash(const FlashArgs& args, cudaStream_t stream);

}  // namespace lkv::cuda
