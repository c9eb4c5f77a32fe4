// How a problem's slots are cut into parts, a thread block or a pair of them each, and where the parts' sums lie.
#pragma once

#include <cstddef>

#include "ops/cuda/problem.h"

namespace lkv::cuda {

// Results, or parts that are merged with another problem's.
enum class Leaves : int32_t { results, parts };

// Exact windows and latents are read by two kernels at the same time, on multiprocessors of their own: both count the slots in use on the
// device, and come to the same number of parts for the windows. A problem is theirs if its n_slots is.
struct Sharing {
    const int32_t* windows;  // [n_windows] slots in use
    const int32_t* latents;  // [n_latents]
    int32_t n_windows;
    int32_t n_latents;
    int32_t parts;          // of the windows' kernel, at most; 0: nothing is shared
    int32_t all_parts;      // so many would fill the device
    int32_t window_blocks;  // thread blocks of one of these parts, a multiprocessor each
    int32_t latent_blocks;  // of a part of the other kernel
    float window_cost;      // of a slot of the windows, in slots of latents
};

struct Cut {
    int32_t unit;         // KV heads of one work item, which share their K group and their V group
    int32_t tile;         // slots of a tile
    int32_t n_split;      // parts of the sequence, at most
    int32_t least_tiles;  // tiles that are worth a part
    int32_t shrinks;  // 1: where there are fewer than enough_parts the tiles become smaller, down to least_shrunk_tile
    int32_t halves;   // 1: of a short cache two thread blocks take half the query rows of a part each
    int32_t
        apart;  // above 0: a thread block has one token's rows, and reads that token's OwnSteps; parts of all tokens between them
    int32_t
        late_slots;  // 1: an earlier kernel of the step writes n_slots, or OwnSteps, which nobody may read before that has ended
    Leaves leaves;
    Sharing sharing;
    float* partial;  // [n_split, n_tokens, n_head, 64·v_blocks] sums, not normalised, and what merging needs after them
    float* partial_ml;  // [n_split, n_tokens, n_head, 2] maximum (base 2) and sum
    uint32_t* done;     // [merge_counters] 0 between launches: thread blocks of a part or of a merge that have finished
};

// What every kernel is launched with; its own plan comes after it.
struct CutProblem : Problem, Cut {};

constexpr int most_parts = 132;
constexpr int least_shrunk_tile = 32;  // slots
constexpr int enough_parts = 64;

// Parts of few tokens are merged by a few thread blocks a head, which count each other.
constexpr int most_counted_tokens = 8;

// Of `apart` parts of all tokens, how many one token may have: sums of all have room for that many each.
constexpr int most_parts_of_token(int apart, int n_tokens) {
    const int share = 4 * apart / n_tokens > 8 ? 4 * apart / n_tokens : 8;
    return share < apart ? share : apart;
}

LKV_HD constexpr int merge_counters(int n_head, int n_kv) {
    return n_kv * ((most_counted_tokens * (n_head / n_kv) + 3) / 4);
}

}  // namespace lkv::cuda
