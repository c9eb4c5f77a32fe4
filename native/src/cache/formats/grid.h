// g8 … g1: one scale per segment on the fixed symmetric grid, b-bit codes.   value = (code + ½ − 2^(b−1)) · scale
//
//   byte 0 … 1     scale, f16 >= 0
//   byte 2 …       codes, 2·b bytes per 16 channels (planes.h)
//
// width channels = 2 + width·b/8 bytes, rounded up to a multiple of 4. Width a multiple of 16.
//
// The scale is fitted: from each starting scale, codes and least-squares scale alternate (Lloyd's iteration with the
// levels tied to one step), and the best squared error wins. Two starts suffice: the one that reaches the largest
// value, and the optimal step for a Gaussian of the same power (Max 1960), which is what a rotated segment looks like.
#pragma once

#include <cmath>

#include "cache/formats/planes.h"

namespace lkv {

template <int Bits>
struct GridFormat {
    static constexpr int width_multiple = chunk_width;
    static constexpr int block = 0;
    static constexpr bool quantized = true;
    static constexpr int scale_at = 0;
    static constexpr int codes_at = 2;
    static constexpr float zero_level = (1 << (Bits - 1)) - 0.5f;  // where 0 lies between the codes
    static constexpr int n_refine = 3;
    using Codes = Planes<Bits>;

    LKV_HD static constexpr int bytes(int width) {
        return round_up_to_word(codes_at + width / chunk_width * Codes::chunk_bytes);
    }

    LKV_HD static void write(const float* x, int width, uint8_t* dst) {
        const uint16_t scale_bits = half_saturate(fit(x, width));
        const float scale = half_to_float(scale_bits);
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        store_u16(dst + scale_at, scale_bits);
        for (int i = 0; i < width; i += chunk_width) {
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

    // Optimal step of a 2^b-level uniform quantizer for a Gaussian of standard deviation 1.
    LKV_HD static constexpr float gaussian_step() {
        constexpr float step[9] = {0.0f, 1.5958f, 0.9957f, 0.5860f, 0.3352f, 0.1881f, 0.1041f, 0.0569f, 0.0308f};
        return step[Bits];
    }

    struct Moments {
        float xl;  // Σ x·level
        float ll;  // Σ level²
    };

    LKV_HD static Moments moments(const float* x, int width, float scale) {
        const float inverse = 1.0f / scale;
        float xl[chunk_width] = {};
        float ll[chunk_width] = {};
        for (int i = 0; i < width; i += chunk_width) {
            for (int j = 0; j < chunk_width; j++) {
                const float level = static_cast<float>(nearest(x[i + j] * inverse)) - zero_level;
                xl[j] += x[i + j] * level;
                ll[j] += level * level;
            }
        }
        for (int j = 1; j < chunk_width; j++) {
            xl[0] += xl[j];
            ll[0] += ll[j];
        }
        return {xl[0], ll[0]};
    }

    LKV_HD static float fit(const float* x, int width) {
        float peak[chunk_width] = {};
        float power[chunk_width] = {};
        for (int i = 0; i < width; i += chunk_width) {
            for (int j = 0; j < chunk_width; j++) {
                const float a = x[i + j] < 0.0f ? -x[i + j] : x[i + j];
                peak[j] = a > peak[j] ? a : peak[j];
                power[j] += a * a;
            }
        }
        for (int j = 1; j < chunk_width; j++) {
            peak[0] = peak[j] > peak[0] ? peak[j] : peak[0];
            power[0] += power[j];
        }
        // Outside this range the squares of the fit leave float's range; the plain scale is exact enough or saturates.
        const float reach = peak[0] / zero_level;
        if (!(peak[0] > 1e-12f && peak[0] < 1e12f)) {
            return reach;
        }

        const float starts[2] = {reach, sqrtf(power[0] / static_cast<float>(width)) * gaussian_step()};
        float best = reach;
        float best_gain = -1.0f;  // (Σ x·level)² / Σ level²: what the grid explains of Σ x²
        for (const float start : starts) {
            float scale = start;
            for (int k = 0; k < n_refine; k++) {
                const Moments m = moments(x, width, scale);
                if (!(m.xl > 0.0f)) {
                    break;
                }
                scale = m.xl / m.ll;
                if (m.xl * scale > best_gain) {
                    best_gain = m.xl * scale;
                    best = scale;
                }
            }
        }
        return best;
    }
};

}  // namespace lkv
