// What a thread block keeps to score a K that is rebuilt from its latent: k = zᵀ·B (+ bias), norm, RoPE, all in registers.
//
// A key at position β + δ is turned by δ only, and the queries back by β: q·R(β + δ)k = (R(β)ᵀq)·(R(δ)k). So the angles of
// δ = 0 … 63 lie in one table that serves every tile, and the queries are turned once for 64 positions. The dimensions are
// in the order of plane_dim: both of a plane's are in one thread, whichever pairing the model has.
#pragma once

#include "ops/cuda/kernels/decode/layout.h"
#include "ops/cuda/rows/dequant.cuh"
#include "ops/cuda/softmax/parts.cuh"
#include "ops/cuda/step/rope.cuh"

namespace lkv::cuda {

struct RebuildTables {
    int n_tiles;      // tiles of 16 dimensions
    float4* queries;  // [n_tiles][32]: lane 4g + c has row g, columns 2c, 2c + 1, 2c + 8, 2c + 9
    float* bias;      // [16·n_tiles]
    float* norm;      // [16·n_tiles]
    uint2* angles;    // [span][angle_pitch]: cosines and sines of planes 2i and 2i + 1

    __device__ RebuildTables(uint8_t* at, const RebuildLayout& layout, int n_tiles)
        : n_tiles(n_tiles),
          queries(reinterpret_cast<float4*>(at)),
          bias(reinterpret_cast<float*>(at + layout.queries)),
          norm(bias + 16 * n_tiles),
          angles(reinterpret_cast<uint2*>(at + layout.queries + layout.extras)) {}

    // All but the queries, which depends on no earlier kernel. By `threads` threads.
    __device__ void fill(const Problem& p, int head_kv, int thread, int threads) const {
        for (int column = thread; p.k_extras != 0 && column < 16 * n_tiles; column += threads) {
            const int dim = plane_dim(p.head_dim, p.n_rot, p.rope_neox != 0, column);
            bias[column] = dim >= 0 && p.k_bias != nullptr ? p.k_bias[head_kv * p.head_dim + dim] : 0.0f;
            norm[column] = dim >= 0 && p.k_norm != nullptr ? p.k_norm[dim] : 0.0f;
        }
        // a thread has the same planes at every position, so that their phases are loaded once
        const int across = 4 * n_tiles;
        const int apart = threads / across;
        const int first = thread / across;
        const int at = thread - first * across;
        const uint64_t phase[2] = {phase_of(p, 2 * at), phase_of(p, 2 * at + 1)};  // 0 where nothing turns
#pragma unroll 1
        for (int position = first; position < (first < apart ? angle_span : 0); position += apart) {
            const float2 of[2] = {angle_of(phase[0], position), angle_of(phase[1], position)};
            angles[position * angle_pitch(n_tiles) + at] =
                make_uint2(bits(__floats2half2_rn(of[0].x, of[1].x)), bits(__floats2half2_rn(of[0].y, of[1].y)));
        }
    }

    // By `threads` threads, of which one that is left over repeats what another does; heads of more dimensions than that have further columns.
    // row_at(i): q of query row i, or null
    template <class RowAt>
    __device__ void fill_queries(const Problem& p, int thread, int threads, RowAt&& row_at) const {
        const int columns = 16 * n_tiles;
        // a column in every apart-th row
        const auto fill = [&](int column, int first, int apart) {
            const int dim = plane_dim(p.head_dim, p.n_rot, p.rope_neox != 0, column);
            auto* const to = reinterpret_cast<float*>(queries) + (column / 16 * 32 + column % 8 / 2) * 4 +
                             column % 16 / 8 * 2 + column % 2;
            float x[decode_rows];
            // all rows at once: trips to the L2 cache one after the other took 2 us
#pragma unroll
            for (int k = 0; k < decode_rows; k++) {
                const int row = first + k * apart;
                const float* const q = row < decode_rows && dim >= 0 ? row_at(row) : nullptr;
                x[k] = q != nullptr ? q[dim] : 0.0f;
            }
#pragma unroll
            for (int k = 0; k < decode_rows; k++) {
                const int row = first + k * apart;
                if (row < decode_rows) to[16 * row] = x[k];
            }
        };
        const int apart = max(1, small_quotient(threads, columns));
        const int first = small_quotient(thread, columns);
        fill(thread - first * columns, min(first, apart - 1), apart);
#pragma unroll 1
        for (int column = thread + threads; column < columns; column += threads) fill(column, 0, 1);
    }

    // The cosine and sine by which the queries turn in plane i, back by `base` positions.
    __device__ static float2 query_angle(const Problem& p, int i, int base) {
        if (i >= p.n_rot / 2) return make_float2(1.0f, 0.0f);
        const float2 of = angle_of(p.phases[i], base);
        return make_float2(of.x * p.rope_mscale, of.y * p.rope_mscale);
    }
    __device__ static uint64_t phase_of(const Problem& p, int i) { return i < p.n_rot / 2 ? p.phases[i] : 0; }

    // This lane's queries of tile j, turned, as operand b. mine: this lane's angle, of which lanes first … first + 7 have those of
    // the tile's planes. By all lanes.
    __device__ uint2 turned_queries(int j, float2 mine, int first) const {
        const float4 q = turned(j, of_planes(mine, first));
        return make_uint2(bits(__floats2half2_rn(q.x, q.y)), bits(__floats2half2_rn(q.z, q.w)));
    }

    // The angles of tile j's planes 2c, 2c + 1 at `delta`, of lane 4g + c.
    __device__ uint2 angles_at(int delta, int j, int lane) const {
        return angles[delta * angle_pitch(n_tiles) + 4 * j + lane % 4];
    }

    // Bias and norm's weight on tile j of the keys of slots g and g + 8: x and y as the products leave a plane's two
    // dimensions. power: += their squares, for the norm.
    __device__ void apply_extras(const Problem& p, int j, float (&x)[4], float (&y)[4], float (&power)[2]) const {
        const int c = threadIdx.x % 4;
        if (p.k_bias != nullptr) {
            const float2 bias_x = *reinterpret_cast<const float2*>(bias + 16 * j + 2 * c);
            const float2 bias_y = *reinterpret_cast<const float2*>(bias + 16 * j + 8 + 2 * c);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[e] += e % 2 == 0 ? bias_x.x : bias_x.y;
                y[e] += e % 2 == 0 ? bias_y.x : bias_y.y;
            }
        }
        if (p.k_norm != nullptr) {
            const float2 norm_x = *reinterpret_cast<const float2*>(norm + 16 * j + 2 * c);
            const float2 norm_y = *reinterpret_cast<const float2*>(norm + 16 * j + 8 + 2 * c);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                power[e / 2] += x[e] * x[e] + y[e] * y[e];
                x[e] *= e % 2 == 0 ? norm_x.x : norm_x.y;
                y[e] *= e % 2 == 0 ? norm_y.x : norm_y.y;
            }
        }
    }

    // These keys turned, as operand a of the scores.
    __device__ static void turn_keys(const float (&x)[4], const float (&y)[4], const uint2 (&angle)[2],
                                     uint32_t (&a)[4]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const __half2 cosine = half2_of(angle[h].x);
            const __half2 sine = half2_of(angle[h].y);
            const __half2 first = __floats2half2_rn(x[2 * h], x[2 * h + 1]);
            const __half2 second = __floats2half2_rn(y[2 * h], y[2 * h + 1]);
            a[h] = bits(__hfma2(first, cosine, __hneg2(__hmul2(second, sine))));
            a[2 + h] = bits(__hfma2(second, cosine, __hmul2(first, sine)));
        }
    }

    // The norm of slots g and g + 8, whose squares four lanes hold.
    __device__ void apply_norm(const Problem& p, const float (&power)[2], float (&scores)[4]) const {
        if (p.k_norm == nullptr) return;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = power[h];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            const float inverse = rsqrtf(sum / static_cast<float>(p.head_dim) + p.k_norm_eps);
            scores[2 * h] *= inverse;
            scores[2 * h + 1] *= inverse;
        }
    }

private:
    // What lanes first + 2c and first + 2c + 1 have. By all lanes.
    __device__ static float4 of_planes(float2 mine, int first) {
        const int from = first + 2 * static_cast<int>(threadIdx.x % 4);
        return make_float4(__shfl_sync(0xffffffffu, mine.x, from), __shfl_sync(0xffffffffu, mine.y, from),
                           __shfl_sync(0xffffffffu, mine.x, from + 1), __shfl_sync(0xffffffffu, mine.y, from + 1));
    }
    // This lane's queries of tile j turned back. by: cosine and sine of planes 2c and 2c + 1
    __device__ float4 turned(int j, float4 by) const {
        const float4 q = queries[j * 32 + threadIdx.x % 32];
        return make_float4(q.x * by.x + q.z * by.y, q.y * by.z + q.w * by.w, q.z * by.x - q.x * by.y,
                           q.w * by.z - q.y * by.w);
    }
};

}  // namespace lkv::cuda
