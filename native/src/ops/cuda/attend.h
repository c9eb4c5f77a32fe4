// Attention on the device: a kernel is chosen for a problem, launched, and its parts are merged; two problems may share one softmax.
#pragma once

#include <string>

#include "ops/cuda/kernel.h"

namespace lkv::cuda {

// The plan of the first kernel that takes the problem. `problem`: pointers that the plan is to have; its shape is filled in.
// refusals: why the kernels before it did not, or null.
// Throws std::invalid_argument, "[cuda] expected …; got …", for shapes no kernel takes.
Plan plan_attention(const Request& request, const Problem& problem, std::string* refusals = nullptr);

// Floats of a plan's sums (Cut::partial), and of its maxima and sums of weights (Cut::partial_ml).
size_t partial_floats(const Plan& plan);
size_t partial_ml_floats(const CutProblem& problem);

// Every call enqueues on the stream and returns the launch's error; nothing synchronises.
cudaError_t attend(const Plan& plan, cudaStream_t stream);

// Latents beside full rows, which leave their parts (attend with Leaves::parts): one softmax over both. What needs no such part yet, on any
// stream; then the rest, after it and the parts.
cudaError_t begin_beside(const Plan& latents, cudaStream_t stream);
cudaError_t end_beside(const Plan& latents, const CutProblem& full, cudaStream_t stream);
// How both share the multiprocessors where they run at the same time. Nothing is shared where one is cut in a way of its own.
Sharing shared_out(const Plan& full, const Plan& latents, const Device& device);

// Attention in a few thread blocks, before the real one of a decode step: a layer's weights displace the kernels' instructions from the
// caches. Some work items in few parts. None for kernels that run long: what the real one waits for is little of it then.
std::optional<Plan> warm_up(const Plan& plan);

}  // namespace lkv::cuda
