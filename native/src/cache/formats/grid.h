// g8 … g1: one scale per segment on the fixed symmetric grid, b-bit codes.   value = (code + ½ − 2^(b−1)) · scale
//
//   byte 0 … 1     scale, f16 >= 0
//   byte 2 …       codes, 2·b bytes per 16 channels (planes.h)
//
// width channels = 2 + width·b/8 bytes, rounded up to a multiple of 4. Width a multiple of 16.
//
// The scale is the one of least squared error (fit.h).
#pragma once

#include "cache/formats/fit.h"

namespace lkv {

template <int Bits>
struct GridFormat {
    static constexpr int width_multiple = chunk_width;
    static constexpr int block = 0;
    static constexpr bool quantized = true;
    static constexpr bool is_fitted = true;
    static constexpr int scale_at = 0;
    static constexpr int codes_at = 2;
    static constexpr float zero_level = (1 << (Bits - 1)) - 0.5f;  // where 0 lies between the codes
    using Codes = Planes<Bits>;

    LKV_HD static constexpr int bytes(int width) {
        return round_up_to_word(codes_at + width / chunk_width * Codes::chunk_bytes);
    }

    LKV_HD static void write(const float* x, int width, uint8_t* dst) {
        const Step step = StepFit<Bits, false>::fit(x, width);
        const uint16_t scale_bits = half_saturate(step.scale);
        const float scale = half_to_float(scale_bits);
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        store_u16(dst + scale_at, scale_bits);
        for (int i = writer() * chunk_width; i < width; i += writers * chunk_width) {
            int32_t code[chunk_width];
            for (int j = 0; j < chunk_width; j++) {
                code[j] = nearest(x[i + j] * inverse);
            }
            Codes::pack(code, dst + codes_at + i / chunk_width * Codes::chunk_bytes);
        }
        for (int i = codes_at + width / chunk_width * Codes::chunk_bytes; i < bytes(width); i++) {
            dst[i] = 0;
        }
    }

    LKV_HD static Affine affine(const uint8_t* src, int) {
        const float scale = load_half(src + scale_at);
        return {scale, -zero_level * scale};
    }

    LKV_HD static float code(const uint8_t* src, int i) {
        return static_cast<float>(Codes::get(src + codes_at + i / chunk_width * Codes::chunk_bytes, i % chunk_width));
    }

#if !defined(__CUDACC__)
    LKV_INLINE static f32x16 codes(const uint8_t* src, int chunk) {
        return Codes::unpack(src + codes_at + chunk * Codes::chunk_bytes);
    }
#endif

private:
    // x in units of the scale
    LKV_HD static int32_t nearest(float x) {
        float level = x + (zero_level + 0.5f);
        level = level > 0.0f ? level : 0.0f;
        level = level < Codes::levels ? level : float{Codes::levels};
        return static_cast<int32_t>(level);
    }
};

}  // namespace lkv
