#include "ops/cuda/step/turn.h"

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/step/rope.cuh"

namespace lkv::cuda {

namespace {

constexpr int turn_threads = max_turned / 4;  // four values each

// Whole heads of a thread block, so that y may be x.
__host__ __device__ constexpr int heads_at_once(int head_dim) { return turn_threads * 4 / head_dim; }

__global__ void __launch_bounds__(turn_threads) turn_kernel(const __grid_constant__ TurnArgs p) {
    let_next_start();
    __shared__ float2 angles[max_rot / 2];
    fill_angles(p.turn, angles);
    __syncthreads();
    wait_for_previous();
    const int heads = heads_at_once(p.turn.head_dim);
    const int from = static_cast<int>(blockIdx.x) * heads * p.turn.head_dim;
    const int end = min(from + heads * p.turn.head_dim, p.n_heads * p.turn.head_dim);
    const int i = from + 4 * static_cast<int>(threadIdx.x);
    float4 of = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i < end) of = turned(p.turn, angles, p.x, i);
    __syncthreads();
    if (i < end) *reinterpret_cast<float4*>(p.y + i) = of;
}

}  // namespace

cudaError_t turn_heads(const TurnArgs& args, cudaStream_t stream) {
    const int heads = heads_at_once(args.turn.head_dim);
    return launch_next(turn_kernel, dim3(static_cast<unsigned>((args.n_heads + heads - 1) / heads)), turn_threads, 0,
                       stream, args);
}

}  // namespace lkv::cuda
