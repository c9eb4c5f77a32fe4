// q8 … q1: one scale and one minimum per segment, b-bit codes.   value = code · scale + minimum
//
//   byte 0 … 1     scale, f16 >= 0
//   byte 2 … 3     minimum, f16
//   byte 4 …       codes, 2·b bytes per 16 channels (planes.h)
//
// width channels = 4 + width·b/8 bytes, rounded up to a multiple of 4. Width a multiple of 16.
//
// The minimum is rounded down and the scale up, so that no value of a segment falls outside the codes: the error is at
// most scale/2 everywhere. (Nearest rounding would clip: minimum 100.02 stored as 100.0625 loses a whole 8-bit step.)
#pragma once

#include "cache/formats/planes.h"

namespace lkv {

template <int Bits>
struct AffineFormat {
    static constexpr int width_multiple = chunk_width;
    static constexpr int block = 0;
    static constexpr bool quantized = true;
    static constexpr int scale_at = 0;
    static constexpr int minimum_at = 2;
    static constexpr int codes_at = 4;
    using Codes = Planes<Bits>;

    LKV_HD static constexpr int bytes(int width) {
        return round_up_to_word(codes_at + width / chunk_width * Codes::chunk_bytes);
    }

    LKV_HD static void write(const float* x, int width, uint8_t* dst) {
        // 16 running extrema, so that the loop is one vector operation per line.
        float low[chunk_width];
        float high[chunk_width];
        for (int j = 0; j < chunk_width; j++) {
            low[j] = high[j] = x[j];
        }
        for (int i = chunk_width; i < width; i += chunk_width) {
            for (int j = 0; j < chunk_width; j++) {
                low[j] = x[i + j] < low[j] ? x[i + j] : low[j];
                high[j] = x[i + j] > high[j] ? x[i + j] : high[j];
            }
        }
        for (int j = 1; j < chunk_width; j++) {
            low[0] = low[j] < low[0] ? low[j] : low[0];
            high[0] = high[j] > high[0] ? high[j] : high[0];
        }

        const uint16_t minimum_bits = half_floor(low[0]);
        const float minimum = half_to_float(minimum_bits);
        const uint16_t scale_bits = high[0] > minimum ? half_ceil((high[0] - minimum) / Codes::levels) : uint16_t{0};
        const float scale = half_to_float(scale_bits);
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        store_u16(dst + scale_at, scale_bits);
        store_u16(dst + minimum_at, minimum_bits);

        for (int i = 0; i < width; i += chunk_width) {
            int32_t code[chunk_width];
            for (int j = 0; j < chunk_width; j++) {
                float level = (x[i + j] - minimum) * inverse + 0.5f;
                level = level > 0.0f ? level : 0.0f;
                level = level < Codes::levels ? level : float{Codes::levels};
                code[j] = static_cast<int32_t>(level);
            }
            Codes::pack(code, dst + codes_at + i / chunk_width * Codes::chunk_bytes);
        }
        for (int i = codes_at + width / chunk_width * Codes::chunk_bytes; i < bytes(width); i++) {
            dst[i] = 0;
        }
    }

    LKV_HD static Affine affine(const uint8_t* src, int) {
        return {load_half(src + scale_at), load_half(src + minimum_at)};
    }

    LKV_HD static float code(const uint8_t* src, int i) {
        return static_cast<float>(Codes::get(src + codes_at + i / chunk_width * Codes::chunk_bytes, i % chunk_width));
    }

#if !defined(__CUDACC__)
    LKV_INLINE static f32x16 codes(const uint8_t* src, int chunk) {
        return Codes::unpack(src + codes_at + chunk * Codes::chunk_bytes);
    }
#endif
};

}  // namespace lkv
