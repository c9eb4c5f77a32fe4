#include "ops/cuda/product.h"

#include <cuda_fp16.h>

#include "ops/cuda/angle.cuh"
#include "ops/cuda/chain.cuh"

namespace lkv::cuda {

namespace {

constexpr int product_threads = 128;

// Lanes that share a row, 16 bytes each at a time.
__host__ __device__ constexpr int row_lanes(int n_in) { return n_in <= 64 ? 8 : (n_in <= 128 ? 16 : 32); }

// Values i … i + 3 of vectors of whole heads, turned. angles: cosine and sine of every plane
__device__ inline float4 turned(const RopeTurn& turn, const float2* angles, const float* x, int64_t i) {
    const float4 four = *reinterpret_cast<const float4*>(x + i);
    const int dim = static_cast<int>(i) % turn.head_dim;
    if (turn.neox == 0) {
        float4 out = four;
        if (dim < turn.n_rot) {
            const float2 of = angles[dim / 2];
            out.x = four.x * of.x - four.y * of.y;
            out.y = four.y * of.x + four.x * of.y;
        }
        if (dim + 2 < turn.n_rot) {
            const float2 of = angles[dim / 2 + 1];
            out.z = four.z * of.x - four.w * of.y;
            out.w = four.w * of.x + four.z * of.y;
        }
        return out;
    }
    const int half = turn.n_rot / 2;
    const float in[4] = {four.x, four.y, four.z, four.w};
    float out[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int at = dim + e;
        out[e] = in[e];
        if (at >= turn.n_rot) continue;
        const bool second = at >= half;
        const float2 of = angles[second ? at - half : at];
        out[e] = second ? in[e] * of.x + x[i + e - half] * of.y : in[e] * of.x - x[i + e + half] * of.y;
    }
    return make_float4(out[0], out[1], out[2], out[3]);
}

// grid: rows / (R x rows side by side), matrices. C: vectors. R: rows of a thread, whose loads are under way together.
template <int C, int R>
__global__ void __launch_bounds__(product_threads) product_kernel(const __grid_constant__ ProductArgs p) {
    let_next_start();
    extern __shared__ __align__(16) float x[];  // [C][n_in]
    const int lanes = row_lanes(p.n_in);
    const int lane = threadIdx.x % lanes;
    const int side = product_threads / lanes;
    const int first = blockIdx.x * R * side + threadIdx.x / lanes;
    const uint16_t* const w = p.w + blockIdx.y * p.w_matrix;
    // weights depend on no earlier kernel
    for (int k = 8 * lane; k < p.n_in; k += 8 * lanes) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int row = first + r * side;
            if (row < p.n_out && k % 64 == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(w + row * p.w_row + k));
        }
    }
    // nor does the position
    __shared__ float2 angles[max_rot / 2];
    if (p.turn.phases != nullptr) {
        for (int i = threadIdx.x; i < p.turn.n_rot / 2; i += product_threads) {
            const float2 of = angle_of(p.turn.phases[i], *p.turn.pos);
            angles[i] = make_float2(of.x * p.turn.mscale, of.y * p.turn.mscale);
        }
        __syncthreads();
    }
    wait_for_previous();
    const int first_column = blockIdx.y * p.n_columns;
    for (int i = 4 * threadIdx.x; i < C * p.n_in; i += 4 * product_threads) {
        const int column = i / p.n_in;
        const int64_t at = static_cast<int64_t>(first_column) * p.n_in + i;
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (column < p.n_columns) {
            four =
                p.turn.phases != nullptr ? turned(p.turn, angles, p.x, at) : *reinterpret_cast<const float4*>(p.x + at);
        }
        *reinterpret_cast<float4*>(x + i) = four;
    }
    __syncthreads();

    float sum[R][C] = {};
#pragma unroll 4
    for (int k = 8 * lane; k < p.n_in; k += 8 * lanes) {
        uint4 of[R];
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int row = min(first + r * side, p.n_out - 1);
            of[r] = __ldg(reinterpret_cast<const uint4*>(w + row * p.w_row + k));
        }
#pragma unroll
        for (int c = 0; c < C; c++) {
            const float4 a = *reinterpret_cast<const float4*>(x + c * p.n_in + k);
            const float4 b = *reinterpret_cast<const float4*>(x + c * p.n_in + k + 4);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float2 w0 = __half22float2(*reinterpret_cast<const __half2*>(&of[r].x));
                const float2 w1 = __half22float2(*reinterpret_cast<const __half2*>(&of[r].y));
                const float2 w2 = __half22float2(*reinterpret_cast<const __half2*>(&of[r].z));
                const float2 w3 = __half22float2(*reinterpret_cast<const __half2*>(&of[r].w));
                sum[r][c] += w0.x * a.x + w0.y * a.y + w1.x * a.z + w1.y * a.w;
                sum[r][c] += w2.x * b.x + w2.y * b.y + w3.x * b.z + w3.y * b.w;
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int row = first + r * side;
#pragma unroll
        for (int c = 0; c < C; c++) {
            for (int o = lanes / 2; o > 0; o /= 2) sum[r][c] += __shfl_xor_sync(0xffffffffu, sum[r][c], o);
            if (lane == 0 && row < p.n_out && c < p.n_columns) {
                p.y[static_cast<int64_t>(first_column + c) * p.n_out + row] = sum[r][c];
            }
        }
    }
}

template <int C, int R>
cudaError_t launch(const ProductArgs& args, cudaStream_t stream) {
    const int rows = R * product_threads / row_lanes(args.n_in);
    const dim3 grid(static_cast<unsigned>((args.n_out + rows - 1) / rows), static_cast<unsigned>(args.n_matrices));
    return launch_next(product_kernel<C, R>, grid, product_threads, sizeof(float) * C * static_cast<size_t>(args.n_in),
                       stream, args);
}

template <int C>
cudaError_t launch_rows(const ProductArgs& args, cudaStream_t stream) {
    // enough thread blocks for every multiprocessor before a thread takes several rows
    const int64_t blocks = int64_t{args.n_out} * args.n_matrices * row_lanes(args.n_in) / product_threads;
    return blocks >= 512 ? launch<C, 4>(args, stream) : launch<C, 1>(args, stream);
}

}  // namespace

cudaError_t multiply(const ProductArgs& args, cudaStream_t stream) {
    if (args.n_columns == 1) return launch_rows<1>(args, stream);
    if (args.n_columns == 2) return launch_rows<2>(args, stream);
    return args.n_columns <= 4 ? launch_rows<4>(args, stream) : launch_rows<8>(args, stream);
}

}  // namespace lkv::cuda
