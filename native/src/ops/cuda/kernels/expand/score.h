// Rebuilt keys that are only multiplied with queries: they are made, turned and multiplied in registers, and only scores leave.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/kernels/expand/layout.h"

namespace lkv::cuda {

constexpr int score_groups = 4;  // warpgroups of a thread block, each with 64 slots at a time
constexpr int score_threads = 128 * score_groups;

// Query rows of one KV head, padded to 8, 16 or 32.
LKV_HD constexpr int score_rows(const Problem& p) {
    const int rows = p.n_tokens * (p.n_head / p.n_kv);
    return rows <= 8 ? 8 : (rows <= 16 ? 16 : 32);
}

constexpr int score_slots = 16;  // of a warp

// Shared memory, in this order. Sizes in bytes, multiples of 16.
struct ScoreLayout {
    int depth;    // channels, rounded up to whole units
    int pitch;    // of B, from eight dimensions to the next: matrices of 128 bytes begin at multiples of that
    int factor;   // B of a thread block's 128 dimensions, as products by warpgroups read it
    int queries;  // see load_query_pairs

    LKV_HD explicit ScoreLayout(const Problem& p)
        : depth((p.k_rank_max + 31) / 32 * 32), pitch(16 * depth), factor(16 * pitch), queries(score_rows(p) * 256) {}
    LKV_HD int total() const { return factor + queries; }
};

// Where a chunk's scores go: f32 [n_tokens · n_head][slots].
struct ScoreTo {
    float* scores;
    int32_t slots;
    int32_t first_tile;  // of the chunk, of expand_tile slots
};

// Floats of a chunk's scores.
inline size_t score_floats(const Plan& p) {
    return static_cast<size_t>(p.n_tokens) * static_cast<size_t>(p.n_head) * static_cast<size_t>(p.chunk);
}

// Thread blocks a head; 0: the shape is not one for it.
int plan_scores(const Device& device, const Problem& p);
cudaError_t launch_scores(const CutProblem& args, int blocks, const ScoreTo& to, cudaStream_t stream);

}  // namespace lkv::cuda
