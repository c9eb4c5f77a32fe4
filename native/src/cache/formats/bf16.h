// bf16: the upper half of an f32, no scale.
//
//   byte 2·i … 2·i+1   channel i
//
// width channels = 2·width bytes, rounded up to a multiple of 4. Any width. Rounded to the nearest, to even codes between two.
#pragma once

#include "base/half.h"
#include "cache/formats/format.h"

namespace lkv {

struct BF16 {
    static constexpr int width_multiple = 1;
    static constexpr int block = 0;
    static constexpr bool quantized = false;

    LKV_HD static constexpr int bytes(int width) { return round_up_to_word(2 * width); }

    LKV_HD static uint16_t rounded(float x) {
        const uint32_t u = float_bits(x);
        if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(u >> 16 | 64u);  // NaN stays NaN
        return static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
    }

    LKV_HD static void write(const float* x, int width, uint8_t* dst) {
        for (int i = writer(); i < width; i += writers) {
            store_u16(dst + 2 * i, rounded(x[i]));
        }
        for (int b = 2 * width; b < bytes(width); b++) {
            dst[b] = 0;
        }
    }

    LKV_HD static Affine affine(const uint8_t*, int) { return {1.0f, 0.0f}; }

    LKV_HD static float code(const uint8_t* src, int i) {
        return float_from_bits(static_cast<uint32_t>(load_u16(src + 2 * i)) << 16);
    }

#if !defined(__CUDACC__)
    LKV_INLINE static f32x16 codes(const uint8_t* src, int chunk) {
        const uint8_t* const p = src + 2 * chunk_width * chunk;
        f32x16 out;
        for (int i = 0; i < lanes; i++) {
            out.lo[i] = code(p, i);
            out.hi[i] = code(p, i + lanes);
        }
        return out;
    }
#endif
};

}  // namespace lkv
