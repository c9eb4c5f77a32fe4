// latent_attn on the CPU, in two phases because the graph offers no barrier inside a node:
//   partial   every work item (some KV heads, every n-th tile of slots) leaves its own softmax states and weighted sums
//   combine   the states of the splits merge, the sum is normalised and, for a latent V, multiplied with B_v
#pragma once

#include <cstddef>
#include <span>

#include "ops/latent_attn.h"

namespace lkv {

// Depends on shapes, row layouts and the number of threads; not on n_slots, so one plan serves a context as it fills.
struct LatentAttnPlan {
    int n_threads;     // threads with temporaries of their own
    int unit_heads;    // KV heads of a work item
    int n_units;       // n_kv / unit_heads
    int n_split;       // tiles are dealt to the splits in turn; items = n_units · n_split
    int block_tokens;  // query tokens that go through a tile together
    bool v_rebuild;    // V tiles are rebuilt per head instead of attending in latent space
    int acc_width;     // floats of one row's weighted sum
    int k_kept;        // most stored channels of a group, over the regions
    int v_kept;
    int row_bytes;          // longest row
    int k_words;            // of the longest group of K in codes (code_scores.h), 0: there is none
    int k_segments;         // most segments of such a group
    size_t scratch_floats;  // size of the scratch buffer, any alignment
};

// Reads shapes and layouts of params, no data. Errors: those of check_latent_attn().
LatentAttnPlan latent_attn_plan(const LatentAttnParams& params, int n_threads);

// Thread ith of nth. nth may differ from the plan's; threads past the plan's stay idle. Every thread must have returned
// from partial before the first enters combine.
void latent_attn_partial(const LatentAttnParams& params, const LatentAttnPlan& plan, float* scratch, int ith, int nth);

// A problem of which every thread has returned from partial.
struct PartialAttn {
    const LatentAttnParams& params;
    const LatentAttnPlan& plan;
    const float* scratch;
};

// One problem, or two of the same queries with one softmax over both; the result goes to the first one's `out`.
void latent_attn_combine(std::span<const PartialAttn> problems, int ith, int nth);

}  // namespace lkv
