// Which steps of a long middle a token reads: those whose weight is estimated to be the largest, of any query head.
//
//   estimate(step, head) = log2 Σ_t 2^(lead(head, t) + rest(head, step))      t: slots of the step that the token sees
//
// lead is the score of a token's first units of K, as stored; rest that of all others, of their mean over the step's tokens. Estimates of a
// head are relative to the sum of them all and of the exact windows' weights. bench/results/levers/reading-qwen-coder.json: scores of a
// leading quarter alone lose seven times as much as these.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "ops/cuda/gpu/device.h"
#include "ops/cuda/rows/rows.h"
#include "ops/cuda/softmax/cut.h"
#include "ops/latent_attn.h"

namespace lkv::cuda {

// How much of a row is scored: a quarter of K's channels leads.
struct ScoredUnits {
    int32_t lead;        // units of 32 channels that are read of every token
    int32_t of_mean;     // units behind them, that are read of the means
    int32_t lead_bytes;  // up to the last leading unit, in the group where these are the most
    int32_t mean_bytes;  // of the widest group
};

// What a choice among the steps of a problem of one region is made from, with its queries.
struct ChoiceArgs : Problem {
    const uint8_t* means;  // [steps] rows like K's (average_steps)
    ScoredUnits units;
    int32_t always_first;  // steps with one of a sequence's first positions are read anyway,
    int32_t always_last;   // or with one of its so many latest
    int32_t n_keep;        // steps that a token reads
    int32_t capacity;      // steps that lists and estimates have room for
    int32_t n_parts;       // parts_of_choice

    float* estimates;  // [n_tokens, capacity, n_head] +inf: the step is read anyway, -inf: nothing in it is seen
    float2* sums;      // [n_tokens, parts_of_choice, n_head] maxima and sums of a head's estimates
    float* weights;    // [n_tokens, capacity] the largest of a step's estimates, relative to the heads' sums
    uint32_t* done;    // [n_tokens] 0 between launches

    int32_t* ends;        // [n_tokens] steps that are read
    int32_t* steps;       // [n_tokens, capacity] which, ascending
    uint64_t* rows_read;  // grows by the slots of the steps that tokens read
};

// Why the kernels cannot choose among such rows on this device, or null.
const char* refuses_choice(const LatentAttnParams& params, const Device& device);
ScoredUnits scored_units(const LatentAttnParams& params);

// Whether the kernel's shared memory holds what it scores, of so many heads a group of K.
bool scores_fit(const ScoredUnits& units, int heads, const Device& device);
constexpr int most_choosing_heads = 256;
constexpr int most_choosable_steps = 65535;  // counts have 16 bits

// Thread blocks that score a token's steps, of one group of K.
int parts_of_choice(const ChoiceArgs& args, const Device& device);

// Enqueued, both: estimates first; then, once the windows have left their parts, the steps. windows: a problem of as many tokens, or null
cudaError_t score_steps(const ChoiceArgs& args, const Device& device, cudaStream_t stream);
cudaError_t choose_steps(const ChoiceArgs& args, const CutProblem* windows, cudaStream_t stream);

// A layer's rows and the means of their steps.
struct AveragedRows {
    RowTarget rows;
    const uint64_t* seq;  // [slots]
    uint8_t* means;       // [steps] rows like K's
    int32_t width;        // channels of a row of K, uncompressed
};
// Where a batch's tokens will go.
struct BatchRowsAt {
    const int32_t* region;  // [n_tokens]
    const int32_t* slot;    // [n_tokens]
    int32_t n_tokens;
    int32_t middle;  // the region that steps are of
};
// Means of these steps, of n_layers layers on the device: of the slots that hold tokens, but for the batch's own. Of none they are zeros.
cudaError_t average_steps(const AveragedRows* layers, int n_layers, int most_width, const int32_t* steps, int n_steps,
                          const BatchRowsAt& unwritten, cudaStream_t stream);

}  // namespace lkv::cuda
