// Queries times K: a warp takes 16 slots and a share of the channels. Latents are operand a, queries operand b.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/kernels/mla/block.cuh"

namespace lkv::cuda {

// Eight channels of a query row as the four pairs that KeyReader names.
__device__ __forceinline__ uint4 query_pairs(const float4 (&of)[2]) {
    return make_uint4(bits(__floats2half2_rn(of[0].x, of[0].z)), bits(__floats2half2_rn(of[0].y, of[0].w)),
                      bits(__floats2half2_rn(of[1].x, of[1].z)), bits(__floats2half2_rn(of[1].y, of[1].w)));
}

// The thread block's query rows as operand b of scores: lane 4n + t has of row n the four pairs of channels that KeyReader names.
template <int NT>
__device__ void load_queries(const MlaArgs& p, const MlaShared& own, uint4* queries) {
    const int n = p.mla.k_units * NT * 32;
    constexpr int at_once = NT;  // of a thread's: all of 16 units
#pragma unroll 1
    for (int i0 = static_cast<int>(threadIdx.x); i0 < n; i0 += at_once * mla_threads) {
        float4 x[at_once][2];
#pragma unroll
        for (int k = 0; k < at_once; k++) {
            const int i = i0 + k * mla_threads;
            const int row = i / 32 % NT * 8 + i % 32 / 4;
            const int channel = i / (32 * NT) * unit_channels + 8 * (i % 4);  // q_width is a multiple of 8
            const int at = i < n ? own.rows[row].at : -1;
            // of expanded keys a row has the units of its own head
            const int first = p.mla.keys.as == MlaK::rows ? own.rows[row].head * p.q_width : 0;
            const bool exists = at >= 0 && channel >= first && channel < first + p.q_width;
            const auto* const from = reinterpret_cast<const float4*>(
                p.q + (exists ? static_cast<int64_t>(at) * p.q_width + channel - first : 0));
            x[k][0] = from[0];
            x[k][1] = from[1];
            if (!exists) x[k][0] = x[k][1] = float4{};
        }
#pragma unroll
        for (int k = 0; k < at_once; k++) {
            const int i = i0 + k * mla_threads;
            if (i >= n) break;
            queries[i] = query_pairs(x[k]);
        }
    }
}

// scores[M][NT][4] += a unit of 16 M slots, decoded, times the query rows.
template <int NT, int M>
__device__ __forceinline__ void multiply_unit(float (&scores)[M][NT][4], const uint32_t (&x)[2 * M][4],
                                              const uint4* query) {
    uint4 q[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) q[n] = query[n * 32];
#pragma unroll
    for (int m = 0; m < M; m++) {
        const uint32_t first[4] = {x[2 * m][0], x[2 * m + 1][0], x[2 * m][1], x[2 * m + 1][1]};
        const uint32_t second[4] = {x[2 * m][2], x[2 * m + 1][2], x[2 * m][3], x[2 * m + 1][3]};
#pragma unroll
        for (int n = 0; n < NT; n++) mma(scores[m][n], first, q[n].x, q[n].y);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(scores[m][n], second, q[n].z, q[n].w);
    }
}

// scores[M][NT][4] += units begin … end - 1, which are of one kind. rows: of the lane's slots g, g + 8, g + 16 …
template <int NT, int Bits, int M = 1>
__device__ __forceinline__ void score_units(float (&scores)[M][NT][4], const uint8_t* const (&rows)[2 * M],
                                            const MlaUnit* units, int begin, int end, const uint4* queries, int lane) {
    const KeyReader<Bits> reader(lane);
    uint32_t affine[2 * M] = {};
    const uint8_t* at[2 * M] = {};
    int segment_end = begin;
    const uint4* query = queries + begin * NT * 32 + lane;
#pragma unroll 1
    for (int u = begin; u < end; u++) {
        if (u == segment_end) {
            const MlaUnit unit = units[u];
            segment_end = unit.end;
#pragma unroll
            for (int i = 0; i < 2 * M; i++) {
                if constexpr (Bits < 16) affine[i] = UnitAffine<Bits>(unit).of(rows[i]);
                at[i] = rows[i] + unit.codes;
            }
        }
        uint32_t words[2 * M][KeyReader<Bits>::n_words];
#pragma unroll
        for (int i = 0; i < 2 * M; i++) reader.load(at[i], words[i]);
        uint32_t x[2 * M][4];
#pragma unroll
        for (int i = 0; i < 2 * M; i++) reader.decode(words[i], affine[i], x[i]);
        multiply_unit<NT, M>(scores, x, query);
#pragma unroll
        for (int i = 0; i < 2 * M; i++) at[i] += unit_bytes<Bits>;
        query += NT * 32;
    }
}

template <bool First, class A, class B>
__device__ __forceinline__ auto& one_of(A& first, B& second) {
    if constexpr (First) {
        return first;
    } else {
        return second;
    }
}

// The same of rows whose group has scales. Of 32 query rows every code is multiplied with its scale: sums of a run are too many registers.
template <int NT, int Bits, int M = 1>
__device__ __forceinline__ void score_codes(float (&scores)[M][NT][4], const uint8_t* const (&rows)[2 * M],
                                            MlaUnit unit, int n_units, const uint4* query, int lane) {
    constexpr bool of_run = M * NT < 4;
    const KeyCodes<Bits> reader(lane);
    const uint8_t* at[2 * M];
    float scale[2 * M];
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        at[i] = rows[i] + unit.codes;
        scale[i] = scale_from_byte(rows[i][unit.affine]) * code_unit<Bits>;
    }
    float of[of_run ? M : 1][of_run ? NT : 1][4] = {};
    auto& sums = one_of<of_run>(of, scores);
    const uint4* const end = query + n_units * NT * 32;
#pragma unroll 1
    for (; query != end; query += NT * 32) {
        uint32_t words[2 * M][KeyCodes<Bits>::n_words];
#pragma unroll
        for (int i = 0; i < 2 * M; i++) reader.load(at[i], words[i]);
        uint32_t x[2 * M][4];
#pragma unroll
        for (int i = 0; i < 2 * M; i++) {
            reader.decode(words[i], x[i]);
            if constexpr (!of_run) {
#pragma unroll
                for (uint32_t& pair : x[i]) pair = bits(__hmul2(half2_of(pair), __float2half2_rn(scale[i])));
            }
        }
        multiply_unit<NT, M>(sums, x, query);
#pragma unroll
        for (int i = 0; i < 2 * M; i++) at[i] += unit_bytes<Bits>;
    }
    if constexpr (of_run) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    scores[m][n][e] = fmaf(sums[m][n][e], scale[2 * m + e / 2], scores[m][n][e]);
                }
            }
        }
    }
}

// The same of units begin … end - 1 of any kinds. scaled: rows whose groups have scales. Whole: or rows that are stored whole
template <int NT, bool Whole, int M = 1>
__device__ __forceinline__ void score_rows(float (&scores)[M][NT][4], const uint8_t* const (&rows)[2 * M],
                                           const MlaUnit* units, int begin, int end, bool scaled, const uint4* queries,
                                           int lane) {
#pragma unroll 1
    for (int u = begin; u < end;) {
        const MlaUnit unit = units[u];
        const int until = min(end, static_cast<int>(unit.kind_end));
        if (scaled) {
            with_scaled_bits(unit.kind, [&](auto bits) __attribute__((always_inline)) {
                score_codes<NT, decltype(bits)::value, M>(scores, rows, unit, until - u, queries + u * NT * 32 + lane,
                                                          lane);
            });
        } else {
            with_bits<Whole, false>(unit.kind, [&](auto bits) __attribute__((always_inline)) {
                score_units<NT, decltype(bits)::value, M>(scores, rows, units, u, until, queries, lane);
            });
        }
        u = until;
    }
}

// The same of expanded keys of f16, by heads: blocks of eight query rows that have none of a head's are left out.
template <int NT>
__device__ __forceinline__ void score_heads(float (&scores)[NT][4], const uint8_t* const (&rows)[2], int begin, int end,
                                            int head_units, const MlaShared& own, const uint4* queries, int lane) {
    constexpr int at_once = 2;  // units under way together
    const KeyReader<16> reader(lane);
    const int my_head = lane < 8 * NT ? own.rows[lane].head : -1;
    int head = -1;
    uint32_t has = 0;  // query rows of this head
    uint32_t words[at_once][2][4];
    const auto load = [&](int u, uint32_t (&to)[2][4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) reader.load(rows[i] + 2 * unit_channels * min(u, end - 1), to[i]);
    };
#pragma unroll
    for (int k = 0; k < at_once; k++) load(begin + k, words[k]);
#pragma unroll 1
    for (int u0 = begin; u0 < end; u0 += at_once) {
#pragma unroll
        for (int k = 0; k < at_once; k++) {
            const int u = u0 + k;
            if (u >= end) break;
            uint32_t x[4];
            uint32_t y[4];
            reader.decode(words[k][0], 0, x);
            reader.decode(words[k][1], 0, y);
            load(u + at_once, words[k]);
            const int of = small_quotient(u, head_units);
            if (of != head) {
                head = of;
                has = __ballot_sync(0xffffffffu, my_head == of);
            }
            const uint32_t first[4] = {x[0], y[0], x[1], y[1]};
            const uint32_t second[4] = {x[2], y[2], x[3], y[3]};
#pragma unroll
            for (int n = 0; n < NT; n++) {
                if ((has >> 8 * n & 0xffu) == 0) continue;
                const uint4 q = queries[(u * NT + n) * 32 + lane];
                mma(scores[n], first, q.x, q.y);
                mma(scores[n], second, q.z, q.w);
            }
        }
    }
}

// One warp's scores: its slots and its share of K's channels.
template <int NT, MlaK K>
__device__ __forceinline__ void score_tile(const MlaArgs& p, const MlaShared& own, const MlaTile& tile,
                                           const uint8_t* stage, const MlaUnit* units, const uint4* queries,
                                           float* all_scores, int warp, int lane) {
    const MlaSide& side = tile.region->k;
    const int slot_warps_bits = __ffs(tile.slots / key_slots) - 1;
    const int share = warp >> slot_warps_bits;
    const int shares_bits = mla_warp_bits - slot_warps_bits;
    const int first_slot = (warp & ((1 << slot_warps_bits) - 1)) * key_slots;
    if (first_slot >= tile.valid) return;
    const uint8_t* const bounds = side.bounds + share_bounds(shares_bits) + share;
    const int end = K == MlaK::rows ? (share + 1) * p.mla.k_units >> shares_bits : bounds[1];
    const int g = lane / 4;
    float scores[1][NT][4] = {};
    int u = K == MlaK::rows ? share * p.mla.k_units >> shares_bits : bounds[0];
    const uint8_t* rows[2];
    if (K != MlaK::values && (K == MlaK::rows || side.pitch == 0)) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int s = min(first_slot + g + 8 * i, tile.valid - 1);
            rows[i] = side.row(tile.first + s);
        }
        if constexpr (K == MlaK::rows) {
            if (u < end) score_heads<NT>(scores[0], rows, u, end, p.head_dim / unit_channels, own, queries, lane);
        } else {
            score_units<NT, 16>(scores, rows, units, u, end, queries, lane);
        }
    } else if constexpr (K == MlaK::latents || K == MlaK::values) {
        rows[0] = stage + staged_lead(side, tile) + (first_slot + g) * side.pitch;
        rows[1] = rows[0] + 8 * side.pitch;
        score_rows<NT, K == MlaK::values>(scores, rows, units, u, end, side.scales >= 0, queries, lane);
    }
    float* const to = all_scores + 2 * (lane % 4) * score_pitch + key_slots * warp + g;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) to[(8 * n + e % 2) * score_pitch + e / 2 * 8] = scores[0][n][e];
    }
}

}  // namespace lkv::cuda
