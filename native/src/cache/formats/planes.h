// Codes of 1 … 8 bits, packed per chunk of 16 channels in bit planes, 2·bits bytes a chunk. A code is its planes' bits,
// the widest plane lowest (q6 = 4 + 2, q5 = 4 + 1, q3 = 2 + 1). Channel j of the chunk:
//
//   8 bits    16 bytes   byte j
//   nibble     8 bytes   byte j % 8, bits 4·(j / 8) … +3
//   2 bits     4 bytes   byte j % 4, bits 2·(j / 4) … +1
//   1 bit      2 bytes   bit j of the little-endian word
//
// A chunk stores its nibble plane first, then the 2-bit plane, then the 1-bit plane. Each unpacks with one load and two
// shifts, into two vectors of eight.
#pragma once

#include "cache/formats/format.h"

namespace lkv {

template <int Bits>
struct Planes {
    static_assert(Bits == 8 || (Bits >= 1 && Bits <= 6), "a code has 8, 6, 5, 4, 3, 2 or 1 bits");

    static constexpr int levels = (1 << Bits) - 1;  // largest code
    static constexpr bool byte = Bits == 8;
    static constexpr bool nibble = !byte && (Bits & 4);
    static constexpr bool pair = !byte && (Bits & 2);
    static constexpr bool single = !byte && (Bits & 1);
    static constexpr int pair_at = nibble ? 8 : 0;              // byte in the chunk
    static constexpr int single_at = pair_at + (pair ? 4 : 0);  // byte in the chunk
    static constexpr int pair_shift = nibble ? 4 : 0;           // bit in the code
    static constexpr int single_shift = pair_shift + (pair ? 2 : 0);
    static constexpr int chunk_bytes = byte ? 16 : single_at + (single ? 2 : 0);

    static_assert(chunk_bytes == 2 * Bits, "the planes fill 16 codes exactly");

    // code: [16], each 0 … levels
    LKV_HD static void pack(const int32_t* code, uint8_t* dst) {
        if constexpr (byte) {
            for (int j = 0; j < chunk_width; j++) {
                dst[j] = static_cast<uint8_t>(code[j]);
            }
        }
        if constexpr (nibble) {
            for (int j = 0; j < 8; j++) {
                dst[j] = static_cast<uint8_t>((code[j] & 15) | (code[j + 8] & 15) << 4);
            }
        }
        if constexpr (pair) {
            for (int j = 0; j < 4; j++) {
                int bits = 0;
                for (int k = 0; k < 4; k++) {
                    bits |= (code[j + 4 * k] >> pair_shift & 3) << (2 * k);
                }
                dst[pair_at + j] = static_cast<uint8_t>(bits);
            }
        }
        if constexpr (single) {
            int bits = 0;
#if defined(__AVX2__) && !defined(__CUDACC__)
            for (int j = 0; j < chunk_width; j += lanes) {
                i32x8 v;
                memcpy(&v, code + j, sizeof v);
                bits |= _mm256_movemask_ps(std::bit_cast<__m256>(v << (31 - single_shift))) << j;
            }
#else
            for (int j = 0; j < chunk_width; j++) bits |= (code[j] >> single_shift & 1) << j;
#endif
            dst[single_at] = static_cast<uint8_t>(bits);
            dst[single_at + 1] = static_cast<uint8_t>(bits >> 8);
        }
    }

    LKV_HD static int32_t get(const uint8_t* chunk, int j) {
        if constexpr (byte) {
            return chunk[j];
        }
        int code = 0;
        if constexpr (nibble) {
            code |= chunk[j % 8] >> (4 * (j / 8)) & 15;
        }
        if constexpr (pair) {
            code |= (chunk[pair_at + j % 4] >> (2 * (j / 4)) & 3) << pair_shift;
        }
        if constexpr (single) {
            code |= (chunk[single_at + j / 8] >> (j % 8) & 1) << single_shift;
        }
        return code;
    }

#if !defined(__CUDACC__)
    LKV_INLINE static f32x16 unpack(const uint8_t* chunk) {
        if constexpr (byte) {
            return {to_f32(load8_u8(chunk)), to_f32(load8_u8(chunk + 8))};
        } else {
            u32x8 lo{};
            u32x8 hi{};
            if constexpr (nibble) {
                const u32x8 v = std::bit_cast<u32x8>(load8_u8(chunk));
                lo = v & 15u;
                hi = v >> 4;
            }
            if constexpr (pair) {
                uint32_t word;
                memcpy(&word, chunk + pair_at, sizeof word);
                const u32x8 v = u32x8{} + word;
                constexpr u32x8 shift = {0, 8,  16, 24,
                                         2, 10, 18, 26};  // channels 0 … 7; the next eight sit 4 bits higher
                lo |= (v >> shift & 3u) << pair_shift;
                hi |= (v >> (shift + 4u) & 3u) << pair_shift;
            }
            if constexpr (single) {
                // The word that ends with this plane: before the first plane of a segment lies its scale, 2 bytes or more.
                uint32_t word;
                memcpy(&word, chunk + single_at - 2, sizeof word);
                const u32x8 v = u32x8{} + word;
                constexpr uint32_t bit = 1u << single_shift;
                constexpr u32x8 shift = u32x8{16, 17, 18, 19, 20, 21, 22, 23} - uint32_t{single_shift};
                lo |= v >> shift & bit;
                hi |= v >> (shift + 8u) & bit;
            }
            return {to_f32(std::bit_cast<i32x8>(lo)), to_f32(std::bit_cast<i32x8>(hi))};
        }
    }
#endif
};

}  // namespace lkv
