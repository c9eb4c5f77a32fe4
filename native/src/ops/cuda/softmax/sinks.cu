// Sinks: a logit of each query head that takes part in the softmax. They join the maxima and sums of a part.
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/softmax/merge.h"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

namespace {

constexpr int sink_threads = 128;
// Powers of two that a sink counts for beyond the part's maximum, at most: what is left of the part's weights is nothing then.
constexpr float most_beyond = 100.0f;

// By one warp a query row.
__global__ void __launch_bounds__(sink_threads)
    sinks_kernel(const __grid_constant__ CutProblem p, const __grid_constant__ Sinks sinks, int fresh) {
    let_next_start();
    wait_for_previous();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = static_cast<int>(blockIdx.x) * (sink_threads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (row >= p.n_tokens * p.n_head) return;
    const int head = row % p.n_head;
    auto* const state = reinterpret_cast<float2*>(p.partial_ml) + row;
    const float sink = sinks.logits[head] * log2_e;
    const float2 part = fresh != 0 ? make_float2(-INFINITY, 0.0f) : *state;
    __syncwarp();  // all lanes have read it
    const bool joins = part.y > 0.0f;
    const float weight = joins ? exp2f(fminf(sink - part.x, most_beyond)) : 1.0f;
    if (lane == 0) *state = joins ? make_float2(part.x, part.y + weight) : make_float2(sink, 1.0f);
    float* const sums = p.partial + static_cast<int64_t>(row) * 64 * p.v_blocks;
    const float* const value = sinks.values == nullptr
                                   ? nullptr
                                   : sinks.values + static_cast<int64_t>(head / (p.n_head / p.n_kv)) * p.head_dim;
    if (joins && value == nullptr) return;
    for (int d = lane; d < p.head_dim; d += 32) {
        sums[d] = (joins ? sums[d] : 0.0f) + (value == nullptr ? 0.0f : weight * value[d]);
    }
}

}  // namespace

cudaError_t add_sinks(const CutProblem& args, const Sinks& sinks, bool fresh, cudaStream_t stream) {
    const auto rows = static_cast<unsigned>(args.n_tokens * args.n_head);
    return launch_next(sinks_kernel, dim3((rows + sink_threads / 32 - 1) / (sink_threads / 32)), sink_threads, 0,
                       stream, args, sinks, fresh ? 1 : 0);
}

CutProblem only_sinks(const CutProblem& of) {
    CutProblem a{};
    a.n_tokens = of.n_tokens;
    a.n_head = of.n_head;
    a.n_kv = of.n_kv;
    a.head_dim = of.head_dim;
    a.v_blocks = (of.head_dim + 63) / 64;
    a.n_slots = of.n_slots;
    a.tile = 64;
    a.n_split = 1;
    a.least_tiles = 1;
    a.leaves = Leaves::parts;
    return a;
}

}  // namespace lkv::cuda
