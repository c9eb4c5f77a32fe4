#include "ops/cuda/step/product.h"

#include <cuda_fp16.h>

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/softmax/halve.cuh"
#include "ops/cuda/step/rope.cuh"

namespace lkv::cuda {

namespace {

constexpr int product_threads = 128;

// Lanes that share a row, 16 bytes each at a time.
__host__ __device__ constexpr int row_lanes(int n_in) { return n_in <= 64 ? 8 : (n_in <= 128 ? 16 : 32); }

// Sums over `lanes` lanes of each of V values: lanes halve them as long as they have two. Value `first` + i of the sums is in of[i],
// i < n; where n is one and lanes are left, every one of them has it.
template <int V>
struct Reduced {
    int first = 0;
    int n = V;
    bool writes = true;

    __device__ Reduced(float (&of)[V], int lanes) {
        const int lane = threadIdx.x % lanes;
        int o = lanes / 2;
#pragma unroll
        for (int half = V / 2; half > 0; half /= 2) {
            if (o == 0) break;
            const bool upper = (lane & o) != 0;
            halve(of, half, o, upper);
            if (upper) first += half;
            n = half;
            o /= 2;
        }
        if (o > 0) writes = (lane & (2 * o - 1)) == 0;
        for (; o > 0; o /= 2) of[0] += __shfl_xor_sync(0xffffffffu, of[0], o);
    }
};

// Chunks of 8 weights that a thread asks for before it has vectors to multiply.
constexpr int early_chunks = 4;

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
    const auto weights = [&](int r, int k) {
        const int row = min(first + r * side, p.n_out - 1);
        return __ldg(reinterpret_cast<const uint4*>(w + row * p.w_row + k));
    };
    // weights depend on no earlier kernel
    constexpr int early = early_chunks / R;
    uint4 of_early[early][R];
#pragma unroll
    for (int i = 0; i < early; i++) {
        const int k = 8 * (lane + i * lanes);
#pragma unroll
        for (int r = 0; r < R; r++) of_early[i][r] = k < p.n_in ? weights(r, k) : make_uint4(0, 0, 0, 0);
    }
    for (int k = 8 * (lane + early * lanes); k < p.n_in; k += 8 * lanes) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int row = first + r * side;
            if (row < p.n_out && k % 64 == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(w + row * p.w_row + k));
        }
    }
    // nor does the position
    __shared__ float2 angles[max_rot / 2];
    if (p.turn.phases != nullptr) {
        fill_angles(p.turn, angles);
        __syncthreads();
    }
    wait_for_previous();
    const int first_column = blockIdx.y * p.n_columns;
    const float* const vectors = p.x + static_cast<int64_t>(first_column) * p.n_in;
    for (int i = 4 * threadIdx.x; i < C * p.n_in; i += 4 * product_threads) {
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < p.n_columns * p.n_in) {
            four = p.turn.phases != nullptr ? turned(p.turn, angles, vectors, i)
                                            : *reinterpret_cast<const float4*>(vectors + i);
        }
        *reinterpret_cast<float4*>(x + i) = four;
    }
    __syncthreads();

    float sum[R * C] = {};
    const auto add = [&](const uint4& of, int r, int k) {
        const float2 w0 = __half22float2(*reinterpret_cast<const __half2*>(&of.x));
        const float2 w1 = __half22float2(*reinterpret_cast<const __half2*>(&of.y));
        const float2 w2 = __half22float2(*reinterpret_cast<const __half2*>(&of.z));
        const float2 w3 = __half22float2(*reinterpret_cast<const __half2*>(&of.w));
#pragma unroll
        for (int c = 0; c < C; c++) {
            const float4 a = *reinterpret_cast<const float4*>(x + c * p.n_in + k);
            const float4 b = *reinterpret_cast<const float4*>(x + c * p.n_in + k + 4);
            sum[r * C + c] += w0.x * a.x + w0.y * a.y + w1.x * a.z + w1.y * a.w;
            sum[r * C + c] += w2.x * b.x + w2.y * b.y + w3.x * b.z + w3.y * b.w;
        }
    };
#pragma unroll
    for (int i = 0; i < early; i++) {
        const int k = 8 * (lane + i * lanes);
        if (k >= p.n_in) break;
#pragma unroll
        for (int r = 0; r < R; r++) add(of_early[i][r], r, k);
    }
#pragma unroll 4
    for (int k = 8 * (lane + early * lanes); k < p.n_in; k += 8 * lanes) {
        uint4 of[R];
#pragma unroll
        for (int r = 0; r < R; r++) of[r] = weights(r, k);
#pragma unroll
        for (int r = 0; r < R; r++) add(of[r], r, k);
    }
    const Reduced<R * C> reduced(sum, lanes);
    if (!reduced.writes) return;
#pragma unroll
    for (int i = 0; i < R * C; i++) {
        if (i >= reduced.n) break;
        const int row = first + (reduced.first + i) / C * side;
        const int c = (reduced.first + i) % C;
        if (row < p.n_out && c < p.n_columns) p.y[static_cast<int64_t>(first_column + c) * p.n_out + row] = sum[i];
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
