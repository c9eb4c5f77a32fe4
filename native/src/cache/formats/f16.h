// f16: IEEE half precision, no scale. Values past ±65504 saturate.
//
//   byte 2·i … 2·i+1   channel i
//
// width channels = 2·width bytes, rounded up to a multiple of 4. Any width.
#pragma once

#include "base/half.h"
#include "cache/formats/format.h"

namespace lkv {

struct F16 {
    static constexpr int width_multiple = 1;
    static constexpr int block = 0;
    static constexpr bool quantized = false;

    LKV_HD static constexpr int bytes(int width) { return round_up_to_word(2 * width); }

    LKV_HD static void write(const float* x, int width, uint8_t* dst) {
        int whole = 0;  // channels that fill vectors
#if !defined(__CUDACC__)
        whole = width / lanes * lanes;
        for (int i = 0; i < whole; i += lanes) {
            store8_half(dst + 2 * i, min8(max8(load8(x + i), splat(-half_max)), splat(half_max)));
        }
#endif
#if defined(__CUDACC__)
#pragma unroll 8
#endif
        for (int i = whole + writer(); i < width; i += writers) {
            store_u16(dst + 2 * i, half_saturate(x[i]));
        }
        for (int b = 2 * width; b < bytes(width); b++) {
            dst[b] = 0;
        }
    }

    LKV_HD static Affine affine(const uint8_t*, int) { return {1.0f, 0.0f}; }

    LKV_HD static float code(const uint8_t* src, int i) { return load_half(src + 2 * i); }

#if !defined(__CUDACC__)
    LKV_INLINE static f32x16 codes(const uint8_t* src, int chunk) {
        const uint8_t* p = src + 2 * chunk_width * chunk;
        return {load8_half(p), load8_half(p + 2 * lanes)};
    }
#endif
};

}  // namespace lkv
