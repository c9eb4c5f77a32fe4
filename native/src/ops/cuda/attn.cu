#include <cuda_fp16.h>

#include "ops/cuda/attn.cuh"
#include "ops/cuda/instances.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/plan.h"

namespace lkv::cuda {

namespace {

constexpr int combine_threads = 256;

// grid: heads x tokens / T. The splits' sums meet, are normalised and, for a latent V, multiplied with B_v.
template <int T>
__global__ void __launch_bounds__(combine_threads) combine_kernel(const __grid_constant__ AttnArgs p) {
    extern __shared__ float shared[];
    const int width = 64 * p.v_blocks;
    const int head = blockIdx.x;
    const int first = blockIdx.y * T;
    const int64_t rows = static_cast<int64_t>(p.n_tokens) * p.n_head;
    float* const latent = shared;                      // [T, width]
    float* const split_scale = shared + T * width;     // [T, n_split]
    float* const parts = split_scale + T * p.n_split;  // [4][T][head_dim]

    for (int t = threadIdx.x / 32; t < T; t += combine_threads / 32) {
        const int token = first + t;
        if (token >= p.n_tokens) continue;
        const int lane = threadIdx.x % 32;
        const int64_t row = static_cast<int64_t>(token) * p.n_head + head;
        float top = -INFINITY;
        for (int s = lane; s < p.n_split; s += 32) top = fmaxf(top, p.partial_ml[2 * (s * rows + row)]);
        for (int o = 16; o > 0; o /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
        float total = 0.0f;
        for (int s = lane; s < p.n_split; s += 32) {
            const float part = p.partial_ml[2 * (s * rows + row) + 1];
            const float weight = part > 0.0f ? exp2f(p.partial_ml[2 * (s * rows + row)] - top) : 0.0f;
            split_scale[t * p.n_split + s] = weight;
            total += part * weight;
        }
        for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(0xffffffffu, total, o);
        const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
        __syncwarp();
        for (int s = lane; s < p.n_split; s += 32) split_scale[t * p.n_split + s] *= inverse;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < T * width; i += combine_threads) {
        const int t = i / width;
        const int d = i - t * width;
        const int token = first + t;
        float sum = 0.0f;
        if (token < p.n_tokens) {
            const int64_t row = static_cast<int64_t>(token) * p.n_head + head;
            const float* from = p.partial + row * width + d;
#pragma unroll 8
            for (int s = 0; s < p.n_split; s++) sum += split_scale[t * p.n_split + s] * from[s * rows * width];
            if (p.v_b == nullptr && d < p.head_dim) p.out[row * p.head_dim + d] = sum;
        }
        latent[i] = sum;
    }
    if (p.v_b == nullptr) return;
    __syncthreads();

    // head_dim in pairs of channels; the threads left over share out the latent's channels
    const int n_pairs = p.head_dim / 2;
    const int slices = min(4, combine_threads / n_pairs);
    const int slice = threadIdx.x / n_pairs;
    const int pair = threadIdx.x % n_pairs;
    const int rank = min(p.v_rank_max, width);
    if (slice < slices) {
        const auto* const factor = reinterpret_cast<const __half2*>(p.v_b) +
                                   static_cast<int64_t>(head / (p.n_head / p.n_kv)) * p.v_rank_max * n_pairs + pair;
        float2 sum[T] = {};
#pragma unroll 8
        for (int ch = slice; ch < rank; ch += slices) {
            const float2 b = __half22float2(__ldg(factor + static_cast<int64_t>(ch) * n_pairs));
#pragma unroll
            for (int t = 0; t < T; t++) {
                const float z = latent[t * width + ch];
                sum[t].x += z * b.x;
                sum[t].y += z * b.y;
            }
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            float* const to = parts + (slice * T + t) * p.head_dim + 2 * pair;
            to[0] = sum[t].x;
            to[1] = sum[t].y;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < T * p.head_dim; i += combine_threads) {
        const int token = first + i / p.head_dim;
        if (token >= p.n_tokens) continue;
        float sum = 0.0f;
        for (int s = 0; s < slices; s++) sum += parts[s * T * p.head_dim + i];
        p.out[(static_cast<int64_t>(token) * p.n_head + head) * p.head_dim + i % p.head_dim] = sum;
    }
}

template <int T>
cudaError_t combine(const AttnArgs& args, cudaStream_t stream) {
    const size_t bytes =
        sizeof(float) * T * (static_cast<size_t>(64 * args.v_blocks) + args.n_split + 4 * args.head_dim);
    if (bytes > 48 * 1024) {
        const cudaError_t error = cudaFuncSetAttribute(combine_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(bytes));
        if (error != cudaSuccess) return error;
    }
    const dim3 grid(args.n_head, (args.n_tokens + T - 1) / T);
    combine_kernel<T><<<grid, combine_threads, bytes, stream>>>(args);
    return cudaGetLastError();
}

}  // namespace

cudaError_t attend(const AttnArgs& args, cudaStream_t stream) {
    const Instance instance = choose_instance(args);
    const cudaError_t error =
        args.k_b != nullptr ? launch_rebuild(args, instance, stream) : launch_direct(args, instance, stream);
    if (error != cudaSuccess || args.partial == nullptr) return error;
    return args.n_tokens >= 4 ? combine<4>(args, stream) : combine<1>(args, stream);
}

}  // namespace lkv::cuda
