#include "ops/cuda/full/full_rows.h"

#include <cuda_fp16.h>

#include <algorithm>

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/rows/rows.cuh"

namespace lkv::cuda {

namespace {

constexpr int encode_threads = 256;
constexpr int encode_warps = encode_threads / 32;
constexpr int encode_tokens = 32;  // of a thread block

// grid: tokens x {K, V}. Rows of any format as f16.
__global__ void __launch_bounds__(encode_threads) read_kernel(const __grid_constant__ EncodeArgs p) {
    const EncodeSide& side = blockIdx.y == 0 ? p.k : p.v;
    const int token = static_cast<int>(blockIdx.x);
    read_row(side.segments, side.n_segments, side.rows + row_offset(p.slots[token], side.page, side.row_bytes),
             reinterpret_cast<__half*>(side.x) + static_cast<int64_t>(token) * side.width);
}

// grid: 16 rows of E x {K, V} x 32 tokens. The warps share out the channels; operand a is E, whose rows come as they lie, b the tokens.
__global__ void __launch_bounds__(encode_threads) encode_kernel(const __grid_constant__ EncodeArgs p) {
    __shared__ float sums[encode_warps][4][4][32];
    const EncodeSide& side = blockIdx.y == 0 ? p.k : p.v;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int row0 = static_cast<int>(blockIdx.x) * 16;
    const int token0 = static_cast<int>(blockIdx.z) * encode_tokens;
    if (row0 >= side.n_out) return;
    const auto* const x = reinterpret_cast<const __half*>(side.x);
    const int column = side.e != nullptr ? side.column[row0] : 0;
    // nothing to multiply with, or rows of two groups: whole ones of odd widths
    if (side.e == nullptr || side.column[min(row0 + 15, side.n_out - 1)] != column) {
        for (int i = static_cast<int>(threadIdx.x); i < 16 * encode_tokens; i += encode_threads) {
            const int token = token0 + i / 16;
            const int row = row0 + i % 16;
            if (token >= p.n || row >= side.n_out) continue;
            const __half* const of = x + static_cast<int64_t>(token) * side.width;
            float sum = side.e == nullptr ? __half2float(of[row]) : 0.0f;
            for (int k = 0; side.e != nullptr && k < side.n_in; k++) {
                const auto* const e = reinterpret_cast<const __half*>(side.e) + static_cast<int64_t>(row) * side.n_in;
                sum += __half2float(e[k]) * __half2float(of[side.column[row] + k]);
            }
            side.z[static_cast<int64_t>(token) * side.n_out + row] = sum;
        }
        return;
    }
    float acc[4][4] = {};
    const int g = lane / 4;
    const auto pair = [&](const uint16_t* from, bool exists, int k) {
        return exists && k < side.n_in ? *reinterpret_cast<const uint32_t*>(from + k) : 0u;
    };
    const auto row_of = [&](int i) { return side.e + static_cast<int64_t>(row0 + i) * side.n_in; };
    const int each = (side.n_in / 2 + 8 * encode_warps - 1) / (8 * encode_warps) * 16;  // channels of a warp
    const int end = min(side.n_in, (warp + 1) * each);
#pragma unroll 4
    for (int k0 = warp * each; k0 < end; k0 += 16) {
        const int k = k0 + 2 * (lane % 4);
        const bool first = row0 + g < side.n_out;
        const bool second = row0 + g + 8 < side.n_out;
        const uint32_t a[4] = {pair(row_of(g), first, k), pair(row_of(g + 8), second, k), pair(row_of(g), first, k + 8),
                               pair(row_of(g + 8), second, k + 8)};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int token = token0 + 8 * n + g;
            const uint16_t* const of = side.x + static_cast<int64_t>(token) * side.width + column;
            mma(acc[n], a, pair(of, token < p.n, k), pair(of, token < p.n, k + 8));
        }
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[warp][n][i][lane] = acc[n][i];
    }
    __syncthreads();
    for (int at = static_cast<int>(threadIdx.x); at < 4 * 4 * 32; at += encode_threads) {
        const int n = at / 128;
        const int i = at / 32 % 4;
        const int of = at % 32;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < encode_warps; w++) sum += sums[w][n][i][of];
        const int token = token0 + 8 * n + of % 4 * 2 + i % 2;
        const int row = row0 + of / 4 + i / 2 * 8;
        if (token < p.n && row < side.n_out) side.z[static_cast<int64_t>(token) * side.n_out + row] = sum;
    }
}

}  // namespace

cudaError_t encode_rows(const EncodeArgs& args, cudaStream_t stream) {
    const auto n = static_cast<unsigned>(args.n);
    read_kernel<<<dim3(n, 2), encode_threads, 0, stream>>>(args);
    const int n_out = std::max(args.k.n_out, args.v.n_out);
    const dim3 grid(static_cast<unsigned>((n_out + 15) / 16), 2, (n + encode_tokens - 1) / encode_tokens);
    encode_kernel<<<grid, encode_threads, 0, stream>>>(args);
    return cudaGetLastError();
}

}  // namespace lkv::cuda
