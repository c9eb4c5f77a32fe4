// Slow planes of rebuilt keys, absorbed into the queries. Over a span of positions in which a RoPE plane turns by a few hundredths, its
// cosine and sine are linear in the position: for |δ| <= S, with x = θS,
//
//   cos δθ = 1 - x²/4 ± x²/4      sin δθ = (δ/S)·x·(1 - x²/8) ± x³/24
//
// so that its share of a score, q·R(β + δ)Bᵀz = (R(β)ᵀq)·(R(δ)Bᵀz), is (a + (δ/S)·b)·z. a is B times the plane's two dimensions of the
// query turned back by β, b the same turned on by a quarter and times x. Both depend on the query and β alone: two columns a query beside
// the dimensions that are still rebuilt, instead of two dimensions a plane to multiply, turn and multiply again for every slot.
// Llama-3.1's planes from 40 of 64 on are linear over 4096 positions (x = 0.07).
#pragma once

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/kernels/decode/rebuild_tables.cuh"

namespace lkv::cuda {

// The nearest finite number.
__device__ inline __half saturated(float x) { return __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f)); }

// The columns of this lane's query rows 2c and 2c + 1, where `mine`, for positions about `about`. By four warps, of which this is `warp`; B:
// 64-channel blocks. head_kv: whose B, read behind pack_k_b_cores' cores: its place in shared memory is given to the columns.
// to: the columns of the first 16 channels; the next ones follow `step` bytes later.
template <int B>
__device__ inline void absorb(const SpecializedArgs& p, const RebuildTables& tables, int head_kv, int about,
                              const bool (&mine)[2], int warp, uint8_t* to, uint32_t step) {
    constexpr int tiles = product_tiles - rebuilt_tiles;
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const auto* const factor = reinterpret_cast<const uint4*>(p.k_b_cores) +
                               static_cast<int64_t>(p.n_kv) * 4 * B * factor_step(B, false) / sizeof(uint4) +
                               (head_kv * 4 * B + warp) * tiles * 32 + lane;
    // a warp has every fourth 16 channels; all are on their way at once
    uint4 words[B][tiles];
#pragma unroll
    for (int m = 0; m < B; m++) {
#pragma unroll
        for (int j = 0; j < tiles; j++) words[m][j] = __ldg(factor + (4 * m * tiles + j) * 32);
    }
    // lanes 0 … 23: of the planes that are absorbed
    const int plane = 8 * rebuilt_tiles + lane;
    const uint64_t phase = RebuildTables::phase_of(p, plane);
    const float2 angle = RebuildTables::query_angle(p, plane, phase, about);
    const float x =
        static_cast<float>(phase) * 3.4061215800304e-19f * static_cast<float>(p.absorbed_span);  // 2π / 2^64
    const float2 fit = make_float2(1.0f - 0.25f * x * x, x * (1.0f - 0.125f * x * x));
    uint2 a[tiles];
    uint2 b[tiles];
#pragma unroll
    for (int j = 0; j < tiles; j++) tables.absorbed_queries(rebuilt_tiles + j, angle, fit, 8 * j, a[j], b[j]);
#pragma unroll
    for (int m = 0; m < B; m++) {
        float of_a[4] = {};
        float of_b[4] = {};
#pragma unroll
        for (int j = 0; j < tiles; j++) {
            const uint32_t factor_of[4] = {words[m][j].x, words[m][j].y, words[m][j].z, words[m][j].w};
            mma(of_a, factor_of, a[j].x, a[j].y);
            mma(of_b, factor_of, b[j].x, b[j].y);
        }
        auto* const at = reinterpret_cast<__half*>(to + (4 * m + warp) * step);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = 2 * c + e % 2;
            if (!mine[e % 2]) continue;
            at[e / 2 * 64 + column * 8 + g] = saturated(of_a[e]);
            at[e / 2 * 64 + (column ^ 4) * 8 + g] = saturated(of_b[e]);
        }
    }
}

}  // namespace lkv::cuda
