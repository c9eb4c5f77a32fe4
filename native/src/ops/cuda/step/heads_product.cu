#include "ops/cuda/step/heads_product.h"

#include <cuda_fp16.h>

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/gpu/mma.cuh"

namespace lkv::cuda {

namespace {

constexpr int warps = 4;
constexpr int threads = 32 * warps;
constexpr int rows = 16 * warps;  // of a matrix, that a thread block takes
constexpr int vectors = 32;       // heads of tokens, likewise
constexpr int channels = 128;     // that are in shared memory at once
constexpr int steps = channels / heads_product_step;
constexpr int turns = vectors / warps;  // a warp stages a vector at a time
static_assert(channels == 4 * 32);
// A lane reads 16 bytes of a vector, eight lanes of two vectors and of four such places.
constexpr int pitch = channels + 32;  // of f16

// A number as two of f16, which make it up but for 2^-22 of it.
struct Split {
    uint32_t high, low;
};
__device__ __forceinline__ Split split(float a, float b) {
    const __half2 high = __floats2half2_rn(a, b);
    const float2 back = __half22float2(high);
    const __half2 low = __floats2half2_rn(a - back.x, b - back.y);
    return {*reinterpret_cast<const uint32_t*>(&high), *reinterpret_cast<const uint32_t*>(&low)};
}

// grid: rows, vectors, matrices. The order of channels in a product is free: lane 4g + c takes eight that lie side by side, of two steps of mma.
__global__ void __launch_bounds__(threads) heads_product_kernel(const __grid_constant__ HeadsProductArgs p) {
    __shared__ uint4 high[vectors][pitch / 8];
    __shared__ uint4 low[vectors][pitch / 8];
    let_next_start();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int first_row = static_cast<int>(blockIdx.x) * rows + warp * 16;
    const int first = static_cast<int>(blockIdx.y) * vectors;
    const int matrix = static_cast<int>(blockIdx.z);
    const int n_vectors = p.n_tokens * p.heads_of_matrix;
    const int n_heads = p.n_matrices * p.heads_of_matrix;
    const uint16_t* const w = p.w + matrix * p.w_matrix;
    const auto weights = [&](int of, int k) {
        if (k >= p.n_in) return make_uint4(0, 0, 0, 0);
        const int row = min(first_row + g + 8 * of, p.n_out - 1);
        return __ldg(reinterpret_cast<const uint4*>(w + row * p.w_row + k + 8 * c));
    };
    // which head of which token a vector is
    const auto place = [&](int vector) {
        const int token = vector / p.heads_of_matrix;
        return static_cast<int64_t>(token) * n_heads + matrix * p.heads_of_matrix + vector - token * p.heads_of_matrix;
    };
    const int own_channel = 4 * lane;
    int64_t own[turns];  // vectors that the warp stages, -1: none
#pragma unroll
    for (int j = 0; j < turns; j++) {
        const int vector = first + warp + warps * j;
        own[j] = vector < n_vectors ? place(vector) : -1;
    }
    float sums[vectors / 8][4] = {};
    uint4 a[steps][2];
    const auto load = [&](int k) {
#pragma unroll
        for (int i = 0; i < steps; i++) {
            a[i][0] = weights(0, k + i * heads_product_step);
            a[i][1] = weights(1, k + i * heads_product_step);
        }
    };
    load(0);  // weights depend on no earlier kernel
    wait_for_previous();
#pragma unroll 1
    for (int k = 0; k < p.n_in; k += channels) {
        if (k > 0) {
            __syncthreads();
            load(k);
        }
        float4 x[turns];  // all on their way together
#pragma unroll
        for (int j = 0; j < turns; j++) {
            const bool exists = own[j] >= 0 && k + own_channel < p.n_in;
            x[j] = exists ? *reinterpret_cast<const float4*>(p.x + own[j] * p.n_in + k + own_channel)
                          : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int j = 0; j < turns; j++) {
            const int vector = warp + warps * j;
            const Split xy = split(x[j].x, x[j].y);
            const Split zw = split(x[j].z, x[j].w);
            reinterpret_cast<uint2*>(high[vector])[lane] = make_uint2(xy.high, zw.high);
            reinterpret_cast<uint2*>(low[vector])[lane] = make_uint2(xy.low, zw.low);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < steps; i++) {
            const uint32_t even[4] = {a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y};
            const uint32_t odd[4] = {a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w};
#pragma unroll
            for (int n = 0; n < vectors / 8; n++) {
                const uint4 h = high[8 * n + g][i * heads_product_step / 8 + c];
                const uint4 l = low[8 * n + g][i * heads_product_step / 8 + c];
                mma(sums[n], even, h.x, h.y);
                mma(sums[n], odd, h.z, h.w);
                mma(sums[n], even, l.x, l.y);
                mma(sums[n], odd, l.z, l.w);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < vectors / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = first_row + g + 8 * (e / 2);
            const int vector = first + 8 * n + 2 * c + e % 2;
            if (row < p.n_out && vector < n_vectors) p.y[place(vector) * p.n_out + row] = sums[n][e];
        }
    }
}

}  // namespace

cudaError_t multiply_heads(const HeadsProductArgs& args, cudaStream_t stream) {
    const int n_vectors = args.n_tokens * args.heads_of_matrix;
    const dim3 grid(static_cast<unsigned>((args.n_out + rows - 1) / rows),
                    static_cast<unsigned>((n_vectors + vectors - 1) / vectors), static_cast<unsigned>(args.n_matrices));
    return launch_next(heads_product_kernel, grid, threads, 0, stream, args);
}

}  // namespace lkv::cuda
