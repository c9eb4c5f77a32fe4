// Scores and sums of the kernel for one region: as in scores.cuh and sums.cuh, of codes as they stand in their words.
#pragma once

#include "ops/cuda/kernels/mla/bare.cuh"
#include "ops/cuda/kernels/mla/scores.cuh"
#include "ops/cuda/kernels/mla/sums.cuh"

namespace lkv::cuda {

// load_queries, each pair multiplied for the bit where its codes are. sums: [k_units + 1][8 · NT], of the rows' queries in all units before;
// of_units: [k_units][8 · NT], for the time being.
template <int NT>
__device__ void load_bare_queries(const MlaArgs& p, const MlaShared& own, const MlaUnit* units, uint4* queries,
                                  float* sums, float* of_units) {
    const int n = p.mla.k_units * NT * 32;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < n; i += mla_threads) {
        const int t = i % 4;
        const int row = i / 32 % NT * 8 + i % 32 / 4;
        const int unit = i / (32 * NT);
        const int channel = unit * unit_channels + 8 * t;  // q_width is a multiple of 8
        const int at = own.rows[row].at;
        const bool exists = at >= 0 && channel < p.q_width;
        const auto* const from =
            reinterpret_cast<const float4*>(p.q + (exists ? static_cast<int64_t>(at) * p.q_width + channel : 0));
        float4 x[2] = {from[0], from[1]};
        if (!exists) x[0] = x[1] = float4{};
        const BareQueries by(units[unit].kind, t);
        float sum = 0.0f;
        const auto pair = [&](float a, float b, int i) {
            const __half2 rounded = __floats2half2_rn(a, b);
            const float2 of = __half22float2(rounded);
            sum += of.x + of.y;
            return bits(__hmul2(rounded, by.times[i]));
        };
        queries[i] = make_uint4(pair(x[0].x, x[0].z, 0), pair(x[0].y, x[0].w, 1), pair(x[1].x, x[1].z, 2),
                                pair(x[1].y, x[1].w, 3));
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (t == 0) of_units[unit * 8 * NT + row] = sum;
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < (p.mla.k_units + 1) * 8 * NT; i += mla_threads) {
        float before = 0.0f;
#pragma unroll 8
        for (int k = i % (8 * NT); k < i; k += 8 * NT) before += of_units[k];
        sums[i] = before;
    }
}

// scores += a run of units of one format.
template <int NT, int Bits>
__device__ __forceinline__ void score_bare(float (&scores)[NT][4], const uint8_t* const (&rows)[2], MlaUnit unit,
                                           int n_units, const uint4* query, const float* query_sums, int lane) {
    const BareKeys<Bits> reader(lane);
    const uint8_t* at[2] = {rows[0] + unit.codes, rows[1] + unit.codes};
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        scale[i] = scale_from_byte(rows[i][unit.affine]) *
                   (NormalFormat<Bits>::step * two_to(subnormal_bits - bare_middle<Bits>));
    }
    float sums[NT][4] = {};
#pragma unroll 1
    for (int u = 0; u < n_units; u++) {
        uint32_t words[2][BareKeys<Bits>::n_words];
#pragma unroll
        for (int i = 0; i < 2; i++) reader.load(at[i], words[i]);
        uint4 q[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) q[n] = query[n * 32];
        uint32_t x[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) reader.decode(words[i], x[i]);
        const uint32_t first[4] = {x[0][0], x[1][0], x[0][1], x[1][1]};
        const uint32_t second[4] = {x[0][2], x[1][2], x[0][3], x[1][3]};
#pragma unroll
        for (int n = 0; n < NT; n++) mma(sums[n], first, q[n].x, q[n].y);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(sums[n], second, q[n].z, q[n].w);
        at[0] += unit_bytes<Bits>;
        at[1] += unit_bytes<Bits>;
        query += NT * 32;
    }
    constexpr float less = -NormalFormat<Bits>::z * two_to(bare_middle<Bits> - subnormal_bits);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 begin = *reinterpret_cast<const float2*>(query_sums + 8 * n);
        const float2 end = *reinterpret_cast<const float2*>(query_sums + 8 * (n_units * NT + n));
        const float of_queries[2] = {end.x - begin.x, end.y - begin.y};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float sum = fmaf(of_queries[e % 2], less, sums[n][e]);
            scores[n][e] = fmaf(sum, scale[e / 2], scores[n][e]);
        }
    }
}

// One warp's scores: its slots and its share of K's channels.
template <int NT>
__device__ __forceinline__ void score_bare_tile(const MlaSide& side, const MlaTile& tile, const uint8_t* stage,
                                                const MlaUnit* units, const uint4* queries, const float* query_sums,
                                                float* all_scores, int warp, int lane) {
    const int slot_warps_bits = __ffs(tile.slots / key_slots) - 1;
    const int share = warp >> slot_warps_bits;
    const int first_slot = (warp & ((1 << slot_warps_bits) - 1)) * key_slots;
    if (first_slot >= tile.valid) return;
    const uint8_t* const bounds = side.bounds + share_bounds(mla_warp_bits - slot_warps_bits) + share;
    const int end = bounds[1];
    const int g = lane / 4;
    float scores[NT][4] = {};
    const uint8_t* const row = stage + side.lead + (first_slot + g) * side.pitch;
    const uint8_t* const rows[2] = {row, row + 8 * side.pitch};
#pragma unroll 1
    for (int u = bounds[0]; u < end;) {
        const MlaUnit unit = units[u];
        const int until = min(end, static_cast<int>(unit.kind_end));
        with_scaled_bits(unit.kind, [&](auto bits) __attribute__((always_inline)) {
            score_bare<NT, decltype(bits)::value>(scores, rows, unit, until - u, queries + u * NT * 32 + lane,
                                                  query_sums + u * 8 * NT + 2 * (lane % 4), lane);
        });
        u = until;
    }
    float* const to = all_scores + 2 * (lane % 4) * score_pitch + key_slots * warp + g;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) to[(8 * n + e % 2) * score_pitch + e / 2 * 8] = scores[n][e];
    }
}

// Sums of V's codes, and of what they were multiplied with.
template <int NT, int U>
struct BareSums {
    UnitSums<NT> codes[U] = {};
    float weights[U][NT][4] = {};

    __device__ __forceinline__ void rescale(const float* scales, int lane) {
        rescale_sums<NT, U>(codes, scales, lane);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const float2 by = *reinterpret_cast<const float2*>(scales + 8 * n + 2 * (lane % 4));
#pragma unroll
            for (int u = 0; u < U; u++) {
                weights[u][n][0] *= by.x;
                weights[u][n][1] *= by.y;
            }
        }
    }
};

// sums += N units of one format, of all slots of a tile.
template <int NT, int Bits, int N, int U>
__device__ __forceinline__ void sum_bare(BareSums<NT, U>& sums, int first, const uint8_t* rows, int pitch, MlaUnit unit,
                                         const __half* weights, const __half* scales, int n16, int lane) {
    const BareValues<Bits> reader(lane);
    const int t = lane % 4;
    const uint8_t* at = rows + 2 * t * pitch + unit.codes + reader.place();
    const auto* scale = reinterpret_cast<const __half2*>(scales) + t;
    constexpr uint32_t one = 0x3c003c00;
    const uint32_t ones[4] = {one, one, one, one};
#pragma unroll 1
    for (int k16 = 0; k16 < n16; k16++) {
        uint32_t words[4][N][BareValues<Bits>::n_words];  // of slots 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int n = 0; n < N; n++)
                reader.load(at + (i % 2 + i / 2 * 8) * pitch + n * unit_bytes<Bits>, words[i][n]);
        }
        uint32_t w[NT][2];
        load_weights<NT>(w, weights, 0, lane);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const __half2 by = scale[4 * i];
#pragma unroll
            for (int n = 0; n < NT; n++) w[n][i] = bits(__hmul2(half2_of(w[n][i]), by));
        }
#pragma unroll
        for (int i = 0; i < NT; i++) mma(sums.weights[first][i], ones, w[i][0], w[i][1]);
#pragma unroll
        for (int n = 0; n < N; n++) {
            uint32_t x[4];
            uint32_t y[4];
            reader.decode(words[0][n], words[1][n], x);
            reader.decode(words[2][n], words[3][n], y);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const uint32_t a[4] = {x[2 * m], x[2 * m + 1], y[2 * m], y[2 * m + 1]};
#pragma unroll
                for (int i = 0; i < NT; i++) mma(sums.codes[first + n][m][i], a, w[i][0], w[i][1]);
            }
        }
        at += 16 * pitch;
        scale += 8;
        weights += 16 * 8 * NT;
    }
}

// Whether unit u and the next one have one format, and their weights' sums are the first one's.
__device__ inline bool are_pair(const MlaUnit* units, int u, int n_units) {
    return u + 1 < min(n_units, static_cast<int>(units[u].kind_end));
}

// One warp's sums: its units of V, all slots.
template <int NT, int U>
__device__ __forceinline__ void sum_bare_tile(BareSums<NT, U>& sums, const MlaSide& side, int n_slots,
                                              const uint8_t* stage, const MlaUnit* units, const __half* weights,
                                              const MlaScales& scales, int warp, int lane) {
    const uint8_t* const rows = stage + side.lead;
    const int n16 = (n_slots + 15) / 16;
    const auto sum = [&](auto n, int first, MlaUnit unit) __attribute__((always_inline)) {
        with_scaled_bits(unit.kind, [&](auto bits) __attribute__((always_inline)) {
            constexpr int Bits = decltype(bits)::value;
            sum_bare<NT, Bits, decltype(n)::value, U>(sums, first, rows, side.pitch, unit, weights,
                                                      scales.of_format<Bits>(), n16, lane);
        });
    };
    const int u = warp * U;
    if (u >= side.n_units) return;
    const MlaUnit unit = units[u];
    if constexpr (U == 2) {
        if (are_pair(units, u, side.n_units)) return sum(std::integral_constant<int, 2>{}, 0, unit);
        if (u + 1 < side.n_units) sum(std::integral_constant<int, 1>{}, 1, units[u + 1]);
    }
    sum(std::integral_constant<int, 1>{}, 0, unit);
}

}  // namespace lkv::cuda
