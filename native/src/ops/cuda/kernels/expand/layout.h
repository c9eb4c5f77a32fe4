// The plans of what expands rebuilt keys, and where it keeps what it makes.
#pragma once

#include "ops/cuda/kernels/mla/layout.h"
#include "ops/cuda/kernels/prefill/layout.h"

namespace lkv::cuda {

// How latents are expanded: from chunks of any format; from units of 32 channels, by single warps or by four at once; so, and multiplied
// with the queries where they are made (score.h).
enum class ExpandBy : int32_t { chunks, units, warpgroup, scores };

constexpr int expand_tile = prefill_tile(1);  // slots, of a chunk's tiles
constexpr int expand_slots = 128;             // that a thread block expands: two tiles, of one region each
static_assert(expand_tile == context_step && expand_slots == chunk_step && expand_tile == key_tile);

struct ExpandArgs : CutProblem {
    int32_t chunk;  // Plan::chunk
    ExpandBy by;
};

// K and V become full rows for the prefill kernel.
struct ExpandPlan {
    ExpandBy by;
    PrefillPlan prefill;
};

// K alone becomes full rows, or scores, for the MLA kernel.
struct ExpandKeysPlan {
    ExpandBy by;
    int32_t score_blocks;  // thread blocks a head that make scores
    MlaPlan mla;
};

// Behind the parts' sums: what a chunk of the context is expanded to. Bytes from the first, multiples of 16.
struct ExpandedRows {
    int64_t k = 0;  // f16 [chunk][n_kv][head_dim]
    int64_t v;
    int64_t seq;      // u64 [chunk], 0: no token
    int64_t pos;      // i32 [chunk]
    int64_t n_slots;  // i32 [4], the first
    int64_t ml;       // f32 [n_tokens][n_head][2] of the chunks before: maximum and sum; their sums are in `out`
    int64_t total;

    LKV_HD ExpandedRows(const Problem& p, int chunk) {
        v = int64_t{chunk} * p.n_kv * p.head_dim * 2;
        seq = 2 * v;
        pos = seq + int64_t{chunk} * 8;
        n_slots = pos + int64_t{chunk} * 4;
        ml = n_slots + 16;
        total = ml + (int64_t{p.n_tokens} * p.n_head * 8 + 15) / 16 * 16;
    }
};

// Attention on the full rows that a chunk is expanded to.
PrefillArgs on_expanded_rows(const CutProblem& p, const PrefillPlan& plan);

cudaError_t attend_expanded(const Plan& plan, const CutProblem* beside, cudaStream_t stream);
cudaError_t launch_expanded_keys(const Plan& plan, cudaStream_t stream);
cudaError_t merge_expanded_keys(const Plan& plan, const CutProblem* full, cudaStream_t stream);

}  // namespace lkv::cuda
