// Two problems with one softmax: what the full rows of the exact windows left in parts is added to the latents' result.
#pragma once

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

constexpr int join_threads = 128;

// By one warp a query row. latents: with results and maxima.
__global__ void __launch_bounds__(join_threads)
    join_kernel(const __grid_constant__ CutProblem full, const __grid_constant__ CutProblem latents) {
    let_next_start();
    wait_for_previous();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t rows = static_cast<int64_t>(latents.n_tokens) * latents.n_head;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (join_threads / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const auto state_of = [&](const CutProblem& p, int count) {
        const auto* const of = reinterpret_cast<const float2*>(p.partial_ml) + row;
        float2 state = make_float2(-INFINITY, 0.0f);
        for (int s = 0; s < count; s++) state.x = fmaxf(state.x, of[s * rows].x);
        for (int s = 0; s < count; s++) {
            const float2 part = of[s * rows];
            if (part.y > 0.0f) state.y += part.y * exp2f(part.x - state.x);
        }
        return state;
    };
    const int n_parts = Parts(full).count;
    const float2 a = state_of(full, n_parts);
    const float2 b = state_of(latents, Parts(latents).count);
    const float top = fmaxf(a.x, b.x);
    const auto share = [&](const float2& x) { return x.y > 0.0f ? exp2f(x.x - top) : 0.0f; };
    const float total = a.y * share(a) + b.y * share(b);
    if (total <= 0.0f) return;  // zeros are there
    const float kept = b.y * share(b) / total;
    float* const out = latents.out + row * latents.head_dim;
    const auto* const maxima = reinterpret_cast<const float2*>(full.partial_ml) + row;
    for (int d = lane; d < latents.head_dim; d += 32) {
        float sum = kept > 0.0f ? kept * out[d] : 0.0f;
        for (int s = 0; s < n_parts; s++) {
            const float2 part = maxima[s * rows];
            if (part.y > 0.0f) sum += share(part) / total * full.partial[(s * rows + row) * 64 * full.v_blocks + d];
        }
        out[d] = sum;
    }
}

}  // namespace lkv::cuda
