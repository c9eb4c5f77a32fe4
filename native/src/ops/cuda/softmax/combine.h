// Parts of the sequence become results, by kernels behind those that left them.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/kernel.h"

namespace lkv::cuda {

// The parts of one problem, multiplied with B_v where V is latent.
cudaError_t merge_parts(const CutProblem& parts, Merge how, cudaStream_t stream);
// Floats of Cut::partial: sums of all parts, then what that merging needs: where heads merge [v_blocks, n_tokens, n_head, head_dim], else one
// part's sums.
size_t parts_floats(const CutProblem& parts, Merge how);

// What the full rows left in parts is added to the latents' results, which have their maxima and sums of weights beside them.
cudaError_t join_parts(const CutProblem& full, const CutProblem& latents, cudaStream_t stream);

// Logits [n_head] and values [n_kv, head_dim], or null: zeros; on the device.
struct Sinks {
    const float* logits;
    const float* values;
};
// Sinks join the first part of what `parts` left. fresh: nothing is there, and the sinks are all of it.
cudaError_t add_sinks(const CutProblem& parts, const Sinks& sinks, bool fresh, cudaStream_t stream);
// A problem of one part, of the queries of `of`, that has no rows: of sinks alone.
CutProblem only_sinks(const CutProblem& of);

}  // namespace lkv::cuda
