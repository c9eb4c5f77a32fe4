#include "ops/cuda/step/turn.h"

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/step/rope.cuh"

namespace lkv::cuda {

namespace {

constexpr int turn_threads = max_turned / 4;  // four values each

// Four values of each of n / 4 neighbouring threads, times the Hadamard matrix of n channels. staged: [turn_threads]. By all threads
__device__ inline float4 times_hadamard(float4 of, int n, float4* staged) {
    of = make_float4(of.x + of.y, of.x - of.y, of.z + of.w, of.z - of.w);
    of = make_float4(of.x + of.z, of.y + of.w, of.x - of.z, of.y - of.w);
    const auto add = [&](const float4& other, int apart) {
        const float sign = (static_cast<int>(threadIdx.x) & apart) == 0 ? 1.0f : -1.0f;
        of = make_float4(fmaf(sign, of.x, other.x), fmaf(sign, of.y, other.y), fmaf(sign, of.z, other.z),
                         fmaf(sign, of.w, other.w));
    };
    for (int apart = 1; apart < 32 && 4 * apart < n; apart *= 2) {
        float4 other;
        other.x = __shfl_xor_sync(0xffffffffu, of.x, apart);
        other.y = __shfl_xor_sync(0xffffffffu, of.y, apart);
        other.z = __shfl_xor_sync(0xffffffffu, of.z, apart);
        other.w = __shfl_xor_sync(0xffffffffu, of.w, apart);
        add(other, apart);
    }
    for (int apart = 32; 4 * apart < n; apart *= 2) {  // another warp's
        __syncthreads();
        staged[threadIdx.x] = of;
        __syncthreads();
        add(staged[static_cast<int>(threadIdx.x) ^ apart], apart);
    }
    const float scale = rsqrtf(static_cast<float>(n));
    return make_float4(of.x * scale, of.y * scale, of.z * scale, of.w * scale);
}

// Whole heads of a thread block, so that y may be x.
__host__ __device__ constexpr int heads_at_once(int head_dim) { return turn_threads * 4 / head_dim; }

__global__ void __launch_bounds__(turn_threads) turn_kernel(const __grid_constant__ TurnArgs p) {
    let_next_start();
    __shared__ float2 angles[max_rot / 2];
    __shared__ float4 staged[turn_threads];
    fill_angles(p.turn, angles);
    __syncthreads();
    wait_for_previous();
    const int heads = heads_at_once(p.turn.head_dim);
    const int from = static_cast<int>(blockIdx.x) * heads * p.turn.head_dim;
    const int end = min(from + heads * p.turn.head_dim, p.n_heads * p.turn.head_dim);
    const int i = from + 4 * static_cast<int>(threadIdx.x);
    float4 of = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i < end) of = turned(p.turn, angles, p.x, i);
    if (p.hadamard != 0) of = times_hadamard(of, p.hadamard, staged);
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
