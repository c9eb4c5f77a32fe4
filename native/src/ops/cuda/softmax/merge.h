// Parts of the sequence become results, by kernels after those that left them.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/softmax/cut.h"

namespace lkv::cuda {

// The parts of one problem, multiplied with B_v where V is latent; full: a problem of full rows whose parts are merged with them, or null.
cudaError_t merge_parts(const CutProblem& parts, const CutProblem* full, cudaStream_t stream);
// Floats of Cut::partial: sums of all parts, then what merging few tokens needs, [v_blocks, n_tokens, n_head, head_dim].
size_t parts_floats(const CutProblem& parts);

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
