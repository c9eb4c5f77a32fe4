// Codes of ggml's blocks of 32 channels: 4 bits each, in 16 bytes, and for codes of 5 bits a word with the fifth ones.
//
//   byte j             channel j in the low nibble, j + 16 in the high nibble, j = 0 … 15
//   bit j of the word  the fifth bit of channel j, j = 0 … 31, little-endian
#pragma once

#include "cache/formats/format.h"

namespace lkv {

constexpr int nibble_block = 32;

// codes: 16 bytes. i: 0 … 31
LKV_HD inline int nibble(const uint8_t* codes, int i) {
    return i < nibble_block / 2 ? codes[i] & 15 : codes[i - nibble_block / 2] >> 4;
}

// word: 4 bytes. 0 or 16
LKV_HD inline int fifth_bit(const uint8_t* word, int i) { return (word[i / 8] >> (i % 8) & 1) << 4; }

// code: [32], 0 … 15, or with a word 0 … 31
LKV_HD inline void put_nibbles(const int* code, uint8_t* codes) {
    for (int j = 0; j < nibble_block / 2; j++) {
        codes[j] = static_cast<uint8_t>((code[j] & 15) | (code[j + nibble_block / 2] & 15) << 4);
    }
}

LKV_HD inline void put_fifth_bits(const int* code, uint8_t* word) {
    for (int byte = 0; byte < nibble_block / 8; byte++) {
        int bits = 0;
        for (int j = 0; j < 8; j++) bits |= (code[8 * byte + j] >> 4 & 1) << j;
        word[byte] = static_cast<uint8_t>(bits);
    }
}

// The extremes of a block. v: [32]
LKV_HD inline void block_extremes(const float* v, float& low, float& high) {
    low = high = v[0];
    for (int i = 1; i < nibble_block; i++) {
        low = v[i] < low ? v[i] : low;
        high = v[i] > high ? v[i] : high;
    }
}

// The value of largest magnitude, the first of equal ones. v: [32]
LKV_HD inline float block_extreme(const float* v) {
    float peak = 0.0f;
    float extreme = 0.0f;
    for (int i = 0; i < nibble_block; i++) {
        const float a = v[i] < 0.0f ? -v[i] : v[i];
        extreme = a > peak ? v[i] : extreme;
        peak = a > peak ? a : peak;
    }
    return extreme;
}

// 1/scale; 0 where that is beyond float's range, and the stored scale is 0.
LKV_HD inline float block_inverse(float scale) {
    constexpr float tiny = 1e-36f;
    return (scale < 0.0f ? -scale : scale) > tiny ? 1.0f / scale : 0.0f;
}

#if !defined(__CUDACC__)
// The codes of one half of a block (chunk 0 or 1) as integers.
LKV_INLINE void load_nibbles(const uint8_t* codes, int chunk, i32x8& lo, i32x8& hi) {
    const int shift = chunk * 4;
    lo = load8_u8(codes) >> shift & 15;
    hi = load8_u8(codes + lanes) >> shift & 15;
}

LKV_INLINE void add_fifth_bits(const uint8_t* word, int chunk, i32x8& lo, i32x8& hi) {
    constexpr i32x8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
    lo |= ((i32x8{} + word[2 * chunk]) >> lane & 1) << 4;
    hi |= ((i32x8{} + word[2 * chunk + 1]) >> lane & 1) << 4;
}
#endif

}  // namespace lkv
