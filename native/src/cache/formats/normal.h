// n8 … n1: codes alone, of rows whose segments share two scales.   value = scale · level
//
// Such a row begins with a word, and its segments follow:
//
//   byte 0 … 1     scale of segments in n5 … n1, f16 >= 0
//   byte 2 … 3     scale of those in n8 and n6, f16 >= 0
//
// A scale that no segment has is 0.
//
// A segment:
//
//   byte 0 …       codes, 2·b bytes per 16 channels (planes.h)
//
// width channels = width·b/8 bytes, rounded up to a multiple of 4. Width a multiple of 16.
//
// Levels are evenly apart, by the step of least squared error for a normal distribution of standard deviation 1 (Max 1960): what a
// channel has that the converter divided by its spread and rotated. level = step · code + bottom. Levels of 2 bits that are not
// evenly apart would have 0.1175 of the power as their error instead of 0.1188, and every kernel would have to look them up.
//
// The scale of n8 and n6 is the smallest at which none of their values is clipped: few channels have these formats, and a clipped one
// costs more than all their rounding. The other scale starts at the root mean square of the channels in n5 … n3 (where there are none,
// of those in n2 and n1, which would pull it from what more bits need). Twice the nearest levels are chosen for these channels and the
// scale follows by least squares; neither step can raise the squared error. Codes are chosen for the scale as stored.
#pragma once

#include <cmath>

#include "cache/formats/fit.h"

namespace lkv {

constexpr int row_scale_bytes = 4;  // of both
constexpr int row_strands = 32;     // sums that segments add to in turn, then halves to halves

// Sums over channels: of x · level and of level².
struct LevelSums {
    float xl;
    float ll;
};

// The scale of n5 … n1, from sums over the channels that it is fitted to.
class RowScaleFit {
public:
    static constexpr int n_refine = 2;

    // power: Σ x² of n channels
    LKV_HD RowScaleFit(float power, int n) : scale_(n > 0 ? sqrtf(power / static_cast<float>(n)) : 0.0f) {}

    // 1 / scale, or 0 where squares would leave float's range.
    LKV_HD float inverse() const { return fits() ? 1.0f / scale_ : 0.0f; }

    // sums: with the levels nearest to x · inverse()
    LKV_HD void refine(const LevelSums& sums) {
        if (fits() && sums.xl > 0.0f && sums.ll > 0.0f) scale_ = sums.xl / sums.ll;
    }

    LKV_HD uint16_t stored() const { return half_saturate(scale_); }

private:
    LKV_HD bool fits() const { return scale_ > 1e-12f && scale_ < 1e12f; }

    float scale_;
};

// A row's first word.
struct RowScales {
    uint16_t clipping;  // of n5 … n1
    uint16_t whole;     // of n8 and n6

    LKV_HD void store(uint8_t* row) const {
        store_u16(row, clipping);
        store_u16(row + sizeof clipping, whole);
    }
    // 1 / the scale as stored: what codes are chosen for.
    LKV_HD float inverse(bool clips) const {
        const float of = half_to_float(clips ? clipping : whole);
        return of > 0.0f ? 1.0f / of : 0.0f;
    }
};
static_assert(sizeof(RowScales) == row_scale_bytes);

// Σ x² of a segment. On a device by a warp.
LKV_HD inline float power_of(const float* x, int width) {
#if defined(__CUDACC__)
    float p = 0.0f;
    for (int i = adder(); i < width; i += adders) p = fmaf(x[i], x[i], p);
    return across<adders>(p, [](float a, float b) { return a + b; });
#else
    f32x8 p[2]{};
    for (int i = 0; i < width; i += 2 * lanes) {
        for (int h = 0; h < 2; h++) {
            const f32x8 v = load8(x + i + h * lanes);
            p[h] = fma8(v, v, p[h]);
        }
    }
    return sum(p[0] + p[1]);
#endif
}

template <int Bits>
struct NormalFormat {
    static constexpr int width_multiple = chunk_width;
    static constexpr int block = 0;
    static constexpr bool quantized = true;
    static constexpr bool scaled_by_row = true;
    using Codes = Planes<Bits>;

    static constexpr int bits = Bits;
    static constexpr bool clips = Bits < 6;
    static constexpr int scale_at = clips ? 0 : 2;
    static constexpr float step = gaussian_step(Bits);
    static constexpr float z = 0.5f * Codes::levels;
    static constexpr float bottom = -z * step;

    LKV_HD static constexpr int bytes(int width) { return round_up_to_word(width / chunk_width * Codes::chunk_bytes); }

    // row: the whole row, from its first byte.
    LKV_HD static Affine affine(const uint8_t* row) {
        const float scale = load_half(row + scale_at);
        return {scale * step, scale * bottom};
    }

    // The code whose level is nearest to x · inverse.
    LKV_HD static int nearest(float x, float inverse) {
        float code = fmaf(x, inverse * (1.0f / step), z + 0.5f);
        code = code > 0.0f ? code : 0.0f;
        code = code < Codes::levels ? code : float{Codes::levels};
        return static_cast<int>(code);
    }

    LKV_HD static float level_of(int code) { return fmaf(static_cast<float>(code), step, bottom); }

    // The least scale that clips none. x: [width], width a multiple of 16. On a device by a warp.
    LKV_HD static float reach(const float* x, int width) {
        float low = 0.0f;
        float high = 0.0f;
        extremes(x, width, low, high);
        return (high > -low ? high : -low) / -bottom;
    }

    // The codes of the levels nearest to x · inverse, likewise.
    LKV_HD static LevelSums sums(const float* x, int width, float inverse) {
#if defined(__CUDACC__)
        LevelSums s{};
#pragma unroll 4
        for (int i = adder(); i < width; i += adders) {
            const float level = level_of(nearest(x[i], inverse));
            s.xl = fmaf(x[i], level, s.xl);
            s.ll = fmaf(level, level, s.ll);
        }
        const auto add = [](float a, float b) { return a + b; };
        return {across<adders>(s.xl, add), across<adders>(s.ll, add)};
#else
        f32x8 xl[2]{}, ll[2]{};
        for (int i = 0; i < width; i += 2 * lanes) {
            for (int h = 0; h < 2; h++) {
                const f32x8 v = load8(x + i + h * lanes);
                const f32x8 level = fma8(to_f32(nearest(v, inverse)), splat(step), splat(bottom));
                xl[h] = fma8(v, level, xl[h]);
                ll[h] = fma8(level, level, ll[h]);
            }
        }
        return {sum(xl[0] + xl[1]), sum(ll[0] + ll[1])};
#endif
    }

    // inverse: of the format's scale as stored
    LKV_HD static void write(const float* x, int width, float inverse, uint8_t* dst) {
        for (int i = writer() * chunk_width; i < width; i += writers * chunk_width) {
            int32_t code[chunk_width];
#if defined(__CUDACC__)
            for (int j = 0; j < chunk_width; j++) code[j] = nearest(x[i + j], inverse);
#else
            for (int j = 0; j < chunk_width; j += lanes) {
                const i32x8 codes = nearest(load8(x + i + j), inverse);
                memcpy(code + j, &codes, sizeof codes);
            }
#endif
            Codes::pack(code, dst + i / chunk_width * Codes::chunk_bytes);
        }
        for (int i = width / chunk_width * Codes::chunk_bytes; i < bytes(width); i++) dst[i] = 0;
    }

    LKV_HD static float code(const uint8_t* src, int i) {
        return static_cast<float>(Codes::get(src + i / chunk_width * Codes::chunk_bytes, i % chunk_width));
    }

#if !defined(__CUDACC__)
    LKV_INLINE static f32x16 codes(const uint8_t* src, int chunk) {
        return Codes::unpack(src + chunk * Codes::chunk_bytes);
    }

private:
    static i32x8 nearest(f32x8 x, float inverse) {
        const f32x8 code = fma8(x, splat(inverse * (1.0f / step)), splat(z + 0.5f));
        return __builtin_convertvector(min8(max8(code, f32x8{}), splat(Codes::levels)), i32x8);
    }
#endif
};

// Which segments of a row the scale of n5 … n1 is fitted to: has_middle, whether one of them has 3 to 5 bits.
LKV_HD constexpr bool fits_scale(int bits, bool has_middle) { return has_middle ? bits >= 3 && bits <= 5 : bits <= 2; }

}  // namespace lkv
