// K in blocks of 32 tokens, a tile of a warp each, beside full f16 rows of exact windows, which are read where they lie.
//
//   score = Σ (code · scale + minimum) · q = Σ code · (scale · q) + Σ minimum · q
//
// Scales belong to channels and hold for all slots of the block. So they go into the queries once a block, and minima are one more row of K.
#pragma once

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/rows/token_blocks.cuh"

namespace lkv::cuda {

// rows: of the block; s: slots 16m + g and 16m + g + 8 for query rows 2c and 2c + 1
template <int Bits, int KB>
__device__ __forceinline__ void score_block(const uint8_t* rows, int pitch, const Chunk* chunks,
                                            const uint32_t (&q)[KB][4][2], int lane, float (&s)[2][4]) {
    const int g = lane / 4;
    float of_minima[4] = {};
#pragma unroll
    for (int b = 0; b < KB; b++) {
        const Chunk chunk = chunks[4 * b + lane % 4];
        uint32_t scaled[4][2];
        {
            BlockNumbers numbers;
            load_block_numbers<Bits, 64 * KB>(rows, pitch, chunk, numbers);
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int h = 0; h < 2; h++)
                    scaled[j][h] = bits(__hmul2(half2_of(q[b][j][h]), half2_of(numbers.scale[j + 4 * h])));
                const uint32_t a[4] = {numbers.minimum[j], numbers.minimum[j], numbers.minimum[j + 4],
                                       numbers.minimum[j + 4]};
                mma(of_minima, a, q[b][j][0], q[b][j][1]);
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            __half2 x[8];
            __half2 y[8];
            load_block_codes<Bits>(rows + (16 * m + g) * pitch, chunk, x);
            load_block_codes<Bits>(rows + (16 * m + g + 8) * pitch, chunk, y);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t a[4] = {bits(x[j]), bits(y[j]), bits(x[j + 4]), bits(y[j + 4])};
                mma(s[m], a, scaled[j][0], scaled[j][1]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int e = 0; e < 4; e++) s[m][e] += of_minima[e];
    }
}

// Rows of one kind as operand a: use(b, m, j, a), product j of block b with slots 16m … 16m + 15. row_at(slot): the group's first byte
template <int Kind, int KB, int MT, class RowAt, class Use>
__device__ __forceinline__ void read_rows(const RowAt& row_at, const Chunk* chunks, int lane, const Use& use) {
#pragma unroll
    for (int b = 0; b < KB; b++) {
        const Chunk chunk = chunks[4 * b + lane % 4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            uint32_t x[8];
            uint32_t y[8];
            two_slots<Kind>(row_at(16 * m + lane / 4), row_at(16 * m + lane / 4 + 8), chunk, x, y);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t a[4] = {x[j], y[j], x[j + 4], y[j + 4]};
                use(b, m, j, a);
            }
        }
    }
}

// V of a tile times its weights.
template <int Kind, int VB, int MT, class RowAt>
__device__ __forceinline__ void add_rows(const RowAt& row_at, const Chunk* chunks, const uint32_t (&w)[MT][2], int lane,
                                         float (&sums)[VB][4][4]) {
    const int g = lane / 4;
#pragma unroll
    for (int b = 0; b < VB; b++) {
        const Chunk chunk = chunks[4 * b + g / 2];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            const int slot = 16 * m + 2 * (lane % 4);
            const uint8_t* const rows[4] = {row_at(slot), row_at(slot + 1), row_at(slot + 8), row_at(slot + 9)};
            uint32_t first[8];
            uint32_t second[8];
            four_slots_at<Kind>([&](int i) { return rows[i]; }, chunk, g % 2, first, second);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t a[4] = {first[2 * j], first[2 * j + 1], second[2 * j], second[2 * j + 1]};
                mma(sums[b][j], a, w[m][0], w[m][1]);
            }
        }
    }
}

// Formats of V beside blocks of K: calls f(kind) as a constant.
template <class Use>
__device__ __forceinline__ void with_value_kind(int kind, Use&& use) {
    switch (static_cast<Format>(kind)) {
#define X(name)        \
    case Format::name: \
        return use(std::integral_constant<int, static_cast<int>(Format::name)>{});
        X(q8)
        X(q6)
        X(q4)
        X(q3)
#undef X
        default:
            return use(std::integral_constant<int, static_cast<int>(Format::q2)>{});
    }
}

}  // namespace lkv::cuda
