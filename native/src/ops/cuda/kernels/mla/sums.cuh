// Weights times V: a warp takes units of channels and all of a tile's slots. Latents are operand a, weights operand b.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/kernels/mla/block.cuh"
#include "ops/cuda/kernels/mla/weights.cuh"

namespace lkv::cuda {

// A lane's sums of a unit of V: channels 4g … 4g + 3 as [two][·][two], rows 8n + 2t and the next one.
template <int NT>
using UnitSums = float[2][NT][4];

// sums[0 … N - 1] += units of one segment, of all slots of a tile.
template <int NT, int Bits, int N, int U>
__device__ __forceinline__ void sum_units(UnitSums<NT> (&sums)[U], int first, const uint8_t* rows, int pitch,
                                          MlaUnit unit, const __half* weights, int n16, const uint32_t* tokens,
                                          int lane) {
    const ValueReader<Bits> reader(lane);
    const int t = lane % 4;
    const uint8_t* at = rows + 2 * t * pitch + unit.codes + reader.place();
    const int behind = unit.codes + reader.place();  // of a row's first byte
#pragma unroll 1
    for (int k16 = 0; k16 < n16; k16++) {
        uint32_t w[NT][2];
        load_weights<NT>(w, weights, k16, lane);
        uint32_t of[4] = {};  // scale and minimum of slots 2t, 2t + 1, 2t + 8, 2t + 9
        uint32_t words[4][N][ValueReader<Bits>::n_words];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint8_t* const slot = at + (i % 2 + i / 2 * 8) * pitch;
            if constexpr (Bits < 16) of[i] = UnitAffine<Bits>(unit).of(slot - behind);
            const bool holds = Bits < 16 || (tokens[k16 / 2] >> (k16 % 2 * 16 + 2 * t + i % 2 + i / 2 * 8) & 1) != 0;
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (holds) {
                    reader.load(slot + n * unit_bytes<Bits>, words[i][n]);
                } else {
#pragma unroll
                    for (uint32_t& word : words[i][n]) word = 0;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            uint32_t x[4];
            uint32_t y[4];
            reader.decode(words[0][n], words[1][n], of[0], of[1], x);
            reader.decode(words[2][n], words[3][n], of[2], of[3], y);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const uint32_t a[4] = {x[2 * m], x[2 * m + 1], y[2 * m], y[2 * m + 1]};
#pragma unroll
                for (int i = 0; i < NT; i++) mma(sums[first + n][m][i], a, w[i][0], w[i][1]);
            }
        }
        at += 16 * pitch;
    }
}

// The same of rows whose groups have scales. scales: of the tile's slots, of this format
template <int NT, int Bits, int N, int U>
__device__ __forceinline__ void sum_codes(UnitSums<NT> (&sums)[U], int first, const uint8_t* rows, int pitch,
                                          MlaUnit unit, const __half* weights, const __half* scales, int n16,
                                          int lane) {
    const ValueCodes<Bits> reader(lane);
    const int t = lane % 4;
    const uint8_t* at = rows + 2 * t * pitch + unit.codes + reader.place();
    const auto* scale = reinterpret_cast<const __half2*>(scales) + t;
    const __half2* const end = scale + 8 * n16;
#pragma unroll 1
    for (; scale != end; scale += 8) {
        uint32_t words[4][N][ValueCodes<Bits>::n_words];  // of slots 2t, 2t + 1, 2t + 8, 2t + 9
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
        for (int n = 0; n < N; n++) {
            uint32_t x[4];
            uint32_t y[4];
            reader.decode(words[0][n], words[1][n], x);
            reader.decode(words[2][n], words[3][n], y);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const uint32_t a[4] = {x[2 * m], x[2 * m + 1], y[2 * m], y[2 * m + 1]};
#pragma unroll
                for (int i = 0; i < NT; i++) mma(sums[first + n][m][i], a, w[i][0], w[i][1]);
            }
        }
        at += 16 * pitch;
        weights += 16 * 8 * NT;
    }
}

// One warp's sums: its units of V, all slots.
template <int NT, int U, MlaK K>
__device__ __forceinline__ void sum_tile(UnitSums<NT> (&sums)[U], const MlaTile& tile, const uint8_t* stage,
                                         const MlaUnit* units, const __half* weights, const uint32_t* tokens,
                                         const MlaScales& scales, int warp, int lane) {
    const MlaSide& side = tile.region->v;
    const int n16 = (tile.valid + 15) / 16;
    const auto sum = [&](auto n, int first, MlaUnit unit) __attribute__((always_inline)) {
        constexpr int N = decltype(n)::value;
        if (K != MlaK::values && side.pitch == 0) {
            const uint8_t* const rows = side.row(tile.first);
            return sum_units<NT, 16, N, U>(sums, first, rows, static_cast<int>(side.row_bytes), unit, weights, n16,
                                           tokens, lane);
        }
        const uint8_t* const rows = stage + staged_lead(side, tile);
        if (side.scales >= 0) {
            return with_scaled_bits(unit.kind, [&](auto bits) __attribute__((always_inline)) {
                constexpr int Bits = decltype(bits)::value;
                sum_codes<NT, Bits, N, U>(sums, first, rows, side.pitch, unit, weights, scales.of_format<Bits>(), n16,
                                          lane);
            });
        }
        with_bits<K == MlaK::values, false>(unit.kind, [&](auto bits) __attribute__((always_inline)) {
            sum_units<NT, decltype(bits)::value, N, U>(sums, first, rows, side.pitch, unit, weights, n16, tokens, lane);
        });
    };
    const int u = warp * U;
    if (u >= side.n_units) return;
    const MlaUnit unit = units[u];
    if constexpr (U == 2) {
        if (u + 1 < static_cast<int>(unit.end)) return sum(std::integral_constant<int, 2>{}, 0, unit);
        if (u + 1 < side.n_units) sum(std::integral_constant<int, 1>{}, 1, units[u + 1]);
    }
    sum(std::integral_constant<int, 1>{}, 0, unit);
}

// scales: of the sums so far
template <int NT, int U>
__device__ __forceinline__ void rescale_sums(UnitSums<NT> (&sums)[U], const float* scales, int lane) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 by = *reinterpret_cast<const float2*>(scales + 8 * n + 2 * (lane % 4));
#pragma unroll
        for (int u = 0; u < U; u++) {
#pragma unroll
            for (int e = 0; e < 8; e++) sums[u][e / 4][n][e % 4] *= e % 2 == 0 ? by.x : by.y;
        }
    }
}

// Rows that hold no token, and those behind the last slot, may decode to anything, NaN too.
__device__ inline void clear_holes(uint8_t* stage, const MlaTile& tile, const uint32_t* tokens, int warp, int lane) {
    const MlaSide& side = tile.region->v;
    if (side.pitch == 0) return;
    uint8_t* const rows = stage + staged_lead(side, tile);
    for (int s = warp; s < (tile.valid + 15) / 16 * 16; s += mla_warps) {
        if ((tokens[s / 32] >> s % 32 & 1) != 0) continue;
        for (uint32_t k = 4 * static_cast<uint32_t>(lane); k < side.bytes; k += 128) {
            *reinterpret_cast<uint32_t*>(rows + s * side.pitch + k) = 0;
        }
    }
}

}  // namespace lkv::cuda
