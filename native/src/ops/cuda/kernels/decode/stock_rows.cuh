// Full rows in ggml's blocks of 32 channels, q8_0 and q4_0, a pair of blocks at a time. A pair begins on a word:
//
//   word 0            scale of the first block, then its first two bytes of codes
//   words 1 … n − 1   its other codes but two bytes
//   word n            these two, then the second block's scale
//   words n + 1 … 2n  codes of the second block                                          n = 8 (q8_0) or 4 (q4_0)
//
// A block's codes are n whole words: of the first block's, word 0 has its own two bytes and two of word n (take_word). Which channels a word
// has matters to nobody as long as queries and sums have the same.
//
// K's codes are operands as they are, 1024 and more in f16, which OR-ing them into its mantissa makes them. A block's product with the queries
// begins at minus what that is too much, and its scale multiplies the result: nothing is rounded. V's codes become values.
#pragma once

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/rows/dequant.cuh"

namespace lkv::cuda {

template <int Kind>
struct StockRows {
    static constexpr bool bytes = Kind == static_cast<int>(Format::q8_0);
    static constexpr int n_words = bytes ? 8 : 4;
    static constexpr int lane_words = n_words / 4;  // of K's block
    static constexpr uint32_t exponent = 0x64006400;

    // Channel of a block, from byte y of word i, low or high nibble.
    __device__ static int channel(int half, int i, int y, int high) {
        const int byte = 4 * i + y - (half == 0 ? 2 : 0);
        return half * 32 + (byte & (4 * n_words - 1)) + 16 * high;
    }
    // The channels of product j with K that lane c has, in bytes y = 0 … 3.
    __device__ static int key_channel(int j, int c, int y) {
        return bytes ? channel(j / 2, c + j % 2 * 4, y, 0) : channel(j / 2, c, y, j % 2);
    }
    // A high nibble counts sixteen times.
    __device__ static float query_unit(int j) { return bytes || j % 2 == 0 ? 1.0f : 0.0625f; }
    // Which channel of the pair row g of tile i is, i = 0 … 7.
    __device__ static int sum_channel(int g, int i) {
        return bytes ? channel(i / 4, g, i % 4, 0) : channel(i / 4, g % 4, i % 4, g / 4);
    }

    // By what codes as operands are too large, of product j.
    __device__ static float excess(int j) { return bytes || j % 2 != 0 ? 1152.0f : 1032.0f; }
    __device__ static uint32_t key_operand(uint32_t word, int j, int odd) {
        const uint32_t x = odd != 0 ? word >> 8 : word;
        if constexpr (bytes) return masked_xor(x, 0x00ff00ffu, exponent | 0x00800080u);
        return masked_xor(x, j % 2 != 0 ? 0x00f000f0u : 0x000f000fu, exponent);
    }

    // Word i of a block's codes. seam: word n
    __device__ static uint32_t take_word(const uint32_t* pair, int half, int i, uint32_t seam) {
        if (half != 0) return pair[n_words + 1 + i];
        return __byte_perm(pair[i], seam, i == 0 ? 0x3254 : 0x3210);
    }

    // Minus the excess of a block's product: zeros[half][i] of query rows 2c + i. q: operand b
    __device__ __forceinline__ static void key_zeros(const uint32_t (&q)[4][2], float (&zeros)[2][2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum[4] = {};
#pragma unroll
            for (int j = 2 * half; j < 2 * half + 2; j++) {
                const uint32_t less = bits(__float2half2_rn(-excess(j)));
                const uint32_t a[4] = {less, less, less, less};
                mma(sum, a, q[j][0], q[j][1]);
            }
            zeros[half][0] = sum[0];
            zeros[half][1] = sum[1];
        }
    }

    // Adds the products of a pair of blocks with the queries: of slots g and g + 8, whose pairs begin at a and b.
    __device__ __forceinline__ static void score(const uint8_t* a, const uint8_t* b, int c, const uint32_t (&q)[4][2],
                                                 const float (&zeros)[2][2], float (&scores)[4]) {
        uint32_t words[2][2][lane_words];  // [slot][half]
        float scales[2][2];
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const auto* const pair = reinterpret_cast<const uint32_t*>(s == 0 ? a : b);
            const uint32_t seam = pair[n_words];
            scales[s][0] = __half22float2(half2_of(pair[0])).x;
            scales[s][1] = __half22float2(half2_of(seam)).y;
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int i = 0; i < lane_words; i++) {
                    // only the first word of lane 0 is parted
                    words[s][half][i] =
                        i == 0 ? take_word(pair, half, c, seam) : pair[half * (n_words + 1) + c + 4 * i];
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum[4] = {zeros[half][0], zeros[half][1], zeros[half][0], zeros[half][1]};
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int i = bytes ? j : 0;
                const uint32_t codes[4] = {key_operand(words[0][half][i], j, 0), key_operand(words[1][half][i], j, 0),
                                           key_operand(words[0][half][i], j, 1), key_operand(words[1][half][i], j, 1)};
                mma(sum, codes, q[2 * half + j][0], q[2 * half + j][1]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) scores[e] = fmaf(sum[e], scales[e / 2][half], scores[e]);
        }
    }

    // Adds a pair of blocks, times the weights w, of slots 0, 1, 8 and 9 of rows `pitch` bytes apart.
    __device__ __forceinline__ static void add(const uint8_t* rows, int pitch, int g, const uint32_t (&w)[2],
                                               float (&sums)[4][4]) {
        const int at = bytes ? g : g % 4;
        const bool high = !bytes && g >= 4;
        const uint32_t mask = high ? 0x00f000f0u : 0x000f000fu;
        const __half2 unit = __float2half2_rn(high ? 0.0625f : 1.0f);
        const __half2 less = __float2half2_rn(bytes ? 1152.0f : (high ? -72.0f : -1032.0f));
        uint32_t words[4][2];
        uint32_t scales[2][2];  // [slots 0 and 1, 8 and 9][half]
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t begin[2];
            uint32_t seam[2];
#pragma unroll
            for (int s = 0; s < 2; s++) {
                const auto* const pair = reinterpret_cast<const uint32_t*>(rows + (s + 8 * k) * pitch);
                begin[s] = pair[0];
                seam[s] = pair[n_words];
                words[2 * k + s][0] = take_word(pair, 0, at, seam[s]);
                words[2 * k + s][1] = take_word(pair, 1, at, seam[s]);
            }
            scales[k][0] = __byte_perm(begin[0], begin[1], 0x5410);
            scales[k][1] = __byte_perm(seam[0], seam[1], 0x7632);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int t = 0; t < 2; t++) {
                uint32_t a[4];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const uint32_t codes =
                        __byte_perm(words[2 * k][half], words[2 * k + 1][half], t != 0 ? 0x7632 : 0x5410);
#pragma unroll
                    for (int odd = 0; odd < 2; odd++) {
                        const uint32_t x = odd != 0 ? codes >> 8 : codes;
                        const __half2 code =
                            bytes ? __hsub2(half2_of(masked_xor(x, 0x00ff00ffu, exponent | 0x00800080u)), less)
                                  : __hfma2(half2_of(masked_xor(x, mask, exponent)), unit, less);
                        a[2 * k + odd] = bits(__hmul2(code, half2_of(scales[k][half])));
                    }
                }
                mma(sums[2 * half + t], a, w[0], w[1]);
            }
        }
    }
};

}  // namespace lkv::cuda
