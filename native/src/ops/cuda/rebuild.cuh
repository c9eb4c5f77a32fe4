// Scores of a K that is rebuilt from its latent, for few query rows: k = zᵀ·B (+ bias), norm, RoPE, all in registers.
//
// A key at position β + δ is turned by δ only, and the queries back by β: q·R(β + δ)k = (R(β)ᵀq)·(R(δ)k). So the angles of
// δ = 0 … 63 lie in one table that serves every tile, and a warp turns its queries once for 64 positions. The dimensions are
// in the order of plane_dim: both of a plane's are in one thread, whichever pairing the model has.
#pragma once

#include "ops/cuda/angle.cuh"
#include "ops/cuda/args.h"
#include "ops/cuda/copy.cuh"
#include "ops/cuda/dequant.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

// What a thread block keeps of one KV head, in shared memory.
struct RebuildTables {
    int n_tiles;      // plane tiles of 16 dimensions
    float4* queries;  // [n_tiles][32]: lane 4g + c has row g, columns 2c, 2c + 1, 2c + 8, 2c + 9
    uint4* factor;  // [k_blocks][n_tiles][4][32]: pack_k_b's words of a tile's first eight dimensions, then its second
    float* bias;    // [16·n_tiles]
    float* norm;    // [16·n_tiles]
    uint2* angles;  // [angle_span][4·n_tiles + 4]: cosines and sines of planes 2i and 2i + 1

    __device__ RebuildTables(const AttnArgs& p, uint8_t* at, const DecodePlan& plan)
        : n_tiles(plane_tiles(p.head_dim, p.n_rot)),
          queries(reinterpret_cast<float4*>(at)),
          factor(reinterpret_cast<uint4*>(at + plan.queries)),
          bias(reinterpret_cast<float*>(at + plan.queries + plan.factor)),
          norm(bias + 16 * n_tiles),
          angles(reinterpret_cast<uint2*>(at + plan.queries + plan.factor + plan.extras)) {}

    __device__ int angle_pitch() const { return 4 * n_tiles + 4; }

    // Everything but the queries, which depends on no earlier kernel; the copies are one group of this thread's.
    __device__ void fill(const AttnArgs& p, int head_kv) const {
        const int words = p.k_blocks * 2 * n_tiles * 4 * 32;
        const auto* const from = reinterpret_cast<const uint2*>(p.k_b_planes) + static_cast<int64_t>(head_kv) * words;
        auto* const to = reinterpret_cast<uint2*>(factor);
        for (int i = threadIdx.x; i < words; i += static_cast<int>(blockDim.x)) {
            copy_async<8>(to + (i / 256 * 128 + i % 128) * 2 + i / 128 % 2, from + i);
        }
        copies_commit();
        for (int i = threadIdx.x; p.k_extras != 0 && i < 16 * n_tiles; i += static_cast<int>(blockDim.x)) {
            const int dim = plane_dim(p.head_dim, p.n_rot, p.rope_neox != 0, i);
            bias[i] = dim >= 0 && p.k_bias != nullptr ? p.k_bias[head_kv * p.head_dim + dim] : 0.0f;
            norm[i] = dim >= 0 && p.k_norm != nullptr ? p.k_norm[dim] : 0.0f;
        }
        for (int i = threadIdx.x; i < angle_span * 4 * n_tiles; i += static_cast<int>(blockDim.x)) {
            const int position = i / (4 * n_tiles);
            const int at = i - position * 4 * n_tiles;
            float2 of[2] = {make_float2(1.0f, 0.0f), make_float2(1.0f, 0.0f)};
#pragma unroll
            for (int k = 0; k < 2; k++) {
                if (2 * at + k < p.n_rot / 2) of[k] = angle_of(p, 2 * at + k, position);
            }
            angles[position * angle_pitch() + at] =
                make_uint2(bits(__floats2half2_rn(of[0].x, of[1].x)), bits(__floats2half2_rn(of[0].y, of[1].y)));
        }
    }

    // row_at(i): q of query row i, or null.
    template <class RowAt>
    __device__ void fill_queries(const AttnArgs& p, RowAt&& row_at) const {
        auto* const to = reinterpret_cast<float*>(queries);
        for (int i = threadIdx.x; i < decode_rows * 16 * n_tiles; i += static_cast<int>(blockDim.x)) {
            const int row = i / (16 * n_tiles);
            const int column = i - row * 16 * n_tiles;
            const int dim = plane_dim(p.head_dim, p.n_rot, p.rope_neox != 0, column);
            const float* const q = row_at(row);
            const int lane = 4 * row + column % 8 / 2;
            to[(column / 16 * 32 + lane) * 4 + column % 16 / 8 * 2 + column % 2] =
                q != nullptr && dim >= 0 ? q[dim] : 0.0f;
        }
    }

    // The queries turned back by `base` positions, as operand b. A lane reads and writes its own.
    __device__ void turn(const AttnArgs& p, int base, uint2* turned) const {
        const int lane = threadIdx.x % 32;
        const int c = lane % 4;
        for (int j0 = 0; j0 < n_tiles; j0 += 4) {
            const int plane = 8 * j0 + lane;
            float2 mine = make_float2(1.0f, 0.0f);
            if (plane < p.n_rot / 2) {
                mine = angle_of(p, plane, base);
                mine.x *= p.rope_mscale;
                mine.y *= p.rope_mscale;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float2 of[2];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    of[k].x = __shfl_sync(0xffffffffu, mine.x, 8 * j + 2 * c + k);
                    of[k].y = __shfl_sync(0xffffffffu, mine.y, 8 * j + 2 * c + k);
                }
                if (j0 + j < n_tiles) {
                    const float4 q = queries[(j0 + j) * 32 + lane];
                    turned[(j0 + j) * 32 + lane] = make_uint2(
                        bits(__floats2half2_rn(q.x * of[0].x + q.z * of[0].y, q.y * of[1].x + q.w * of[1].y)),
                        bits(__floats2half2_rn(q.z * of[0].x - q.x * of[0].y, q.w * of[1].x - q.y * of[1].y)));
                }
            }
        }
    }

    // scores[m]: slots 16m + g and 16m + g + 8 for query rows 2c and 2c + 1, as mma leaves them. z: operand a of the latents;
    // delta: how far past the queries' turn these slots are.
    template <int KB, int MT>
    __device__ void scores(const AttnArgs& p, const uint32_t (&z)[KB][MT][4][4], const int (&delta)[MT][2],
                           const uint2* turned, float (&scores)[MT][4]) const {
        const int lane = threadIdx.x % 32;
        const int c = lane % 4;
        float power[MT][2] = {};
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int e = 0; e < 4; e++) scores[m][e] = 0.0f;
        }
#pragma unroll 1
        for (int j = 0; j < n_tiles; j++) {
            // what the turn needs is on its way during the products
            const uint2 q = turned[j * 32 + lane];
            uint2 angle[MT][2];
#pragma unroll
            for (int m = 0; m < MT; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) angle[m][h] = angles[delta[m][h] * angle_pitch() + 4 * j + c];
            }
            // two sums each where the chain of products is long
            constexpr int sums = KB > 1 ? 2 : 1;
            float x[sums * MT][4] = {};
            float y[sums * MT][4] = {};
#pragma unroll
            for (int b = 0; b < KB; b++) {
                if (b > 0 && b >= p.k_blocks) break;
                const uint4* const of = factor + (b * n_tiles + j) * 4 * 32 + lane;
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    const uint4 f = of[s * 32];
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        mma(x[s % sums * MT + m], z[b][m][s], f.x, f.y);
                        mma(y[s % sums * MT + m], z[b][m][s], f.z, f.w);
                    }
                }
            }
            if constexpr (sums == 2) {
#pragma unroll
                for (int m = 0; m < MT; m++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        x[m][e] += x[MT + m][e];
                        y[m][e] += y[MT + m][e];
                    }
                }
            }
            if (p.k_bias != nullptr) {
                const float2 bias_x = *reinterpret_cast<const float2*>(bias + 16 * j + 2 * c);
                const float2 bias_y = *reinterpret_cast<const float2*>(bias + 16 * j + 8 + 2 * c);
#pragma unroll
                for (int m = 0; m < MT; m++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        x[m][e] += e % 2 == 0 ? bias_x.x : bias_x.y;
                        y[m][e] += e % 2 == 0 ? bias_y.x : bias_y.y;
                    }
                }
            }
            if (p.k_norm != nullptr) {
                const float2 norm_x = *reinterpret_cast<const float2*>(norm + 16 * j + 2 * c);
                const float2 norm_y = *reinterpret_cast<const float2*>(norm + 16 * j + 8 + 2 * c);
#pragma unroll
                for (int m = 0; m < MT; m++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        power[m][e / 2] += x[m][e] * x[m][e] + y[m][e] * y[m][e];
                        x[m][e] *= e % 2 == 0 ? norm_x.x : norm_x.y;
                        y[m][e] *= e % 2 == 0 ? norm_y.x : norm_y.y;
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < MT; m++) {
                uint32_t a[4];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const __half2 cosine = half2_of(angle[m][h].x);
                    const __half2 sine = half2_of(angle[m][h].y);
                    const __half2 first = __floats2half2_rn(x[m][2 * h], x[m][2 * h + 1]);
                    const __half2 second = __floats2half2_rn(y[m][2 * h], y[m][2 * h + 1]);
                    a[h] = bits(__hfma2(first, cosine, __hneg2(__hmul2(second, sine))));
                    a[2 + h] = bits(__hfma2(second, cosine, __hmul2(first, sine)));
                }
                mma(scores[m], a, q.x, q.y);
            }
        }
        if (p.k_norm != nullptr) {
#pragma unroll
            for (int m = 0; m < MT; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float sum = power[m][h];
                    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                    const float inverse = rsqrtf(sum / static_cast<float>(p.head_dim) + p.k_norm_eps);
                    scores[m][2 * h] *= inverse;
                    scores[m][2 * h + 1] *= inverse;
                }
            }
        }
    }
};

}  // namespace lkv::cuda
