// q8 … q1: one scale and one minimum per segment, b-bit codes.   value = code · scale + minimum
//
//   byte 0 … 1     scale, f16 >= 0
//   byte 2 … 3     minimum, f16
//   byte 4 …       codes, 2·b bytes per 16 channels (planes.h)
//
// width channels = 4 + width·b/8 bytes, rounded up to a multiple of 4. Width a multiple of 16.
//
// Up to 4 bits scale and minimum are those of least squared error (fit.h). Above, and where the minimum dwarfs the step,
// they span the segment: the minimum rounded down and the scale up, so that no value falls outside the codes and the error
// is at most scale/2 everywhere. (Nearest rounding would clip: 100.02 stored as 100.0625 loses a whole 8-bit step.)
#pragma once

#include "cache/formats/fit.h"

namespace lkv {

template <int Bits>
struct AffineFormat {
    static constexpr int width_multiple = chunk_width;
    static constexpr int block = 0;
    static constexpr bool quantized = true;
    static constexpr int scale_at = 0;
    static constexpr int minimum_at = 2;
    static constexpr int codes_at = 4;
    static constexpr int max_fitted_bits = 4;
    static constexpr bool is_fitted = Bits <= max_fitted_bits;
    using Codes = Planes<Bits>;

    LKV_HD static constexpr int bytes(int width) {
        return round_up_to_word(codes_at + width / chunk_width * Codes::chunk_bytes);
    }

    struct Stored {
        uint16_t scale;
        uint16_t minimum;
    };

    // x: [width], width a multiple of 16.
    LKV_HD static Stored choose(const float* x, int width) {
        if constexpr (is_fitted) {
            const Step step = StepFit<Bits>::fit(x, width);
            const float minimum = fmaf(-Codes::levels * 0.5f, step.scale, step.centre);
            // Rounding the minimum to half moves it by up to |minimum| / 2048: only while that is a small part of a step.
            if (fabsf(minimum) < 64.0f * step.scale && step.scale > 1e-6f) {
                return {half_saturate(step.scale), half_saturate(minimum)};
            }
        }
        float low = x[0];
        float high = x[0];
        extremes(x, width, low, high);
        const uint16_t minimum = half_floor(low);
        const float range = high - half_to_float(minimum);
        return {range > 0.0f ? half_ceil(range / Codes::levels) : uint16_t{0}, minimum};
    }

    LKV_HD static void write(const float* x, int width, uint8_t* dst) {
        const Stored stored = choose(x, width);
        const float minimum = half_to_float(stored.minimum);
        const float scale = half_to_float(stored.scale);
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        store_u16(dst + scale_at, stored.scale);
        store_u16(dst + minimum_at, stored.minimum);

        for (int i = writer() * chunk_width; i < width; i += writers * chunk_width) {
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
