// A slot's stored row, of any region, as a thread of the expanding kernel reads it.
#pragma once

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/kernels/expand/layout.h"
#include "ops/cuda/routes.h"
#include "ops/cuda/rows/token_blocks.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

constexpr int expand_columns = 128;
constexpr int expand_depth = 32;  // channels of a step
constexpr int expand_stages = 3;
constexpr int expand_threads = 128;
constexpr int latent_pitch = 2 * expand_depth + 16;    // bytes, odd multiples of 16
constexpr int factor_pitch = 2 * expand_columns + 16;  // also of the result
constexpr int expand_shared = 2 * expand_slots * latent_pitch + expand_stages * expand_depth * factor_pitch;
static_assert(expand_shared >= expand_slots * factor_pitch && expand_columns == most_expanded_head);

// K or V as it is expanded.
struct ExpandSide {
    const uint16_t* factor;  // f16 [n_kv][rank][head_dim]; null: rows are full already
    const float* bias;       // [n_kv, head_dim]
    const float* norm;       // [head_dim]
    int32_t rank;
    int32_t group;   // KV heads that share a latent
    int32_t blocks;  // of 64 stored channels
    int32_t heads;   // that a thread block makes, or `columns` of one
    int32_t columns;
    int32_t n_rot;

    ExpandSide(const Problem& p, bool is_k)
        : factor(is_k ? p.k_b : p.v_b),
          bias(is_k ? p.k_bias : nullptr),
          norm(is_k ? p.k_norm : nullptr),
          rank(is_k ? p.k_rank_max : p.v_rank_max),
          group(is_k ? p.k_group : p.v_group),
          blocks(is_k ? p.k_blocks : p.v_blocks),
          heads(1),
          columns(p.head_dim < expand_columns ? p.head_dim : expand_columns),
          n_rot(is_k ? p.n_rot : 0) {
        for (int n = 2; n <= group && n * p.head_dim <= expand_columns; n++) {
            if (group % n == 0) heads = n;
        }
    }
};

// A thread's slot.
struct ExpandSlot {
    const uint8_t* row;   // of the group's first staged byte; of the last slot in use where this one is not
    const Chunk* chunks;  // of the group
    int pos;
    uint64_t seq;
    int row_bytes;
    int in_block;  // which slot of its block of tokens, 0 where rows stand alone
};

__device__ inline ExpandSlot slot_of(const CutProblem& p, const Parts& parts, bool is_k, int group, int first_tile) {
    const int thread = static_cast<int>(threadIdx.x);
    const int at = first_tile + static_cast<int>(blockIdx.x) * (expand_slots / expand_tile) + thread / expand_tile;
    ExpandSlot to{};
    if (at >= parts.n_tiles) return to;
    const int r = parts.region_of(at);
    const RegionArgs& region = p.regions[r];
    const GroupTable& table = (is_k ? region.k_groups : region.v_groups)[group];
    const int slot = (at - parts.tiles_before(r)) * expand_tile + thread % expand_tile;
    const int last = p.n_slots[r] - 1;
    to.chunks = region.chunks + table.chunks;
    to.row_bytes = static_cast<int>(is_k ? region.k_row_bytes : region.v_row_bytes);
    to.in_block = is_k ? min(slot, last) % region.k_block : 0;
    const int held = min(slot, last);
    to.row = (is_k ? region.k_row(held) : region.v_row(held)) + table.first;
    if (slot > last) return to;
    to.pos = region.pos[slot];
    to.seq = region.seq[slot];
    return to;
}

// 16 channels in their order, zero where there are none.
__device__ inline void put_chunk(const ExpandSlot& slot, int j, void* to) {
    uint32_t x[8] = {};
    if (slot.row != nullptr) {
        const int64_t before = static_cast<int64_t>(slot.in_block) * slot.row_bytes;
        pairs_in_block(slot.row - before, slot.in_block, slot.row_bytes, slot.chunks[j], x);
    }
    auto* const at = static_cast<uint4*>(to);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        at[i] = make_uint4(__byte_perm(x[4 * i], x[4 * i + 1], 0x5410), __byte_perm(x[4 * i], x[4 * i + 1], 0x7632),
                           __byte_perm(x[4 * i + 2], x[4 * i + 3], 0x5410),
                           __byte_perm(x[4 * i + 2], x[4 * i + 3], 0x7632));
    }
}

// 16 of a step's 32 channels, in the order of KeyReader's pairs.
__device__ inline void put_pairs(const ExpandSlot& slot, int j, uint8_t* to) {
    uint32_t x[8] = {};
    if (slot.row != nullptr) pairs_of_chunk(slot.row, slot.chunks[j], x);
#pragma unroll
    for (int q = 0; q < 4; q++) *reinterpret_cast<uint2*>(to + 16 * q + 8 * (j % 2)) = make_uint2(x[q], x[q + 4]);
}

// Steps up to the last channel that any of the thread block's slots stores.
__device__ inline int steps_of(const ExpandSlot& slot, int n_chunks) {
    int kept = 0;
    for (int j = static_cast<int>(threadIdx.x) % 32; j < n_chunks; j += 32) {
        if (slot.row != nullptr && slot.chunks[j].kind != kind_none) kept = j + 1;
    }
    int steps = 0;
    for (int bit = 8; bit >= 0; bit--) {  // at most 2048 channels
        if (__syncthreads_or((kept + 1) / 2 >= steps + (1 << bit))) steps += 1 << bit;
    }
    return steps;
}

}  // namespace lkv::cuda
