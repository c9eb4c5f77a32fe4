// n8 … n1: codes alone, of groups whose segments share scales.   value = scale · level
//
// Such a group begins with a word, and its segments follow:
//
//   byte 0         scale of segments in n1
//   byte 1         scale of those in n2
//   byte 2         scale of those in n5, n4 and n3
//   byte 3         scale of those in n8 and n6
//
// A scale is the upper byte of an f16 that is not negative, without its sign: byte << 7 (1/16 to 1/8 apart). One that no segment has is 0.
//
// A segment:
//
//   byte 0 …       codes, 2·b bytes per 16 channels (planes.h)
//
// width channels = width·b/8 bytes, rounded up to a multiple of 4. Width a multiple of 16.
//
// Levels are evenly apart, by the step of least squared error for a normal distribution of standard deviation 1 (Max 1960): what a
// channel has that the converter divided by its spread and rotated. level = step · code + bottom. Levels of 2 bits that are not
// evenly apart would have 0.1175 of the power as their error instead of 0.1188, and every kernel would have to look them up. A step has
// seven bits, so that its product with a scale is exact in f16.
//
// The scale of n8 and n6 is the smallest at which none of their values is clipped: few channels have these formats, and a clipped one
// costs more than all their rounding. The others start at the root mean square of their channels. Twice the nearest levels are chosen and
// the scale follows by least squares; neither step can raise the squared error. One and two bits would pull it from what more bits need,
// so they have their own. Codes are chosen for the scale as stored.
//
// Levels of least squared error are too small: their product with the value is the power less the error, as if all rows were shrunk, and
// a shrunken row is one error in all channels and all tokens, where rounding averages out in a score and over the tokens of V. So levels
// are read further apart than they are fitted. SmolLM2-135M at 8.5 % of f16, two windows: 0.0198 nats with levels as fitted, 0.0150 with
// half of what is missing.
#pragma once

#include <cmath>

#include "cache/formats/fit.h"

namespace lkv {

constexpr int group_scale_bytes = 4;  // a byte each

// A scale as a byte, and as it is read.
LKV_HD inline uint16_t half_of_scale(uint8_t scale) { return static_cast<uint16_t>(scale << 7); }
LKV_HD inline float scale_from_byte(uint8_t scale) { return half_to_float(half_of_scale(scale)); }

// half: not negative; up: what is added to the seven bits that go. Saturating.
LKV_HD inline uint8_t byte_of_scale(uint16_t half, int up) {
    const int byte = (half + up) >> 7;
    return static_cast<uint8_t>(byte < 0xf7 ? byte : 0xf7);
}
LKV_HD inline uint8_t nearest_scale(float x) { return byte_of_scale(half_saturate(x), 0x40); }
LKV_HD inline uint8_t scale_above(float x) { return byte_of_scale(half_ceil(x), 0x7f); }

// Values are compared with levels this far apart.
LKV_HD constexpr float normal_step(int bits) {
    constexpr float step[9] = {0.0f,           102.0f / 64.0f,   128.0f / 128.0f,  75.0f / 128.0f,  86.0f / 256.0f,
                               96.0f / 512.0f, 107.0f / 1024.0f, 116.0f / 2048.0f, 126.0f / 4096.0f};
    return step[bits];
}

// Levels are read (1 - D)^-1/2 times as far apart, with D the error of a format in parts of the power.
LKV_HD constexpr float read_step(int bits) {
    constexpr float step[9] = {0.0f,           128.0f / 64.0f,   68.0f / 64.0f,    76.0f / 128.0f,  86.0f / 256.0f,
                               96.0f / 512.0f, 107.0f / 1024.0f, 116.0f / 2048.0f, 126.0f / 4096.0f};
    return step[bits];
}

// A sum over channels of several segments: sixteen that take turns, added up once. On a device by a warp, a lane each.
#if defined(__CUDACC__)
using Turns = float;
__device__ inline float total(Turns of) {
    return across<adders>(of, [](float a, float b) { return a + b; });
}
#else
struct Turns {
    f32x8 of[2]{};
};
LKV_INLINE float total(const Turns& turns) { return sum(turns.of[0] + turns.of[1]); }
#endif

// A scale from sums over the channels that it is fitted to.
class ScaleFit {
public:
    static constexpr int n_refine = 2;

    // power: Σ x² of n channels
    LKV_HD ScaleFit(float power, int n) : scale_(n > 0 ? sqrtf(power / static_cast<float>(n)) : 0.0f) {}

    // 1 / scale, or 0 where squares would leave float's range.
    LKV_HD float inverse() const { return fits() ? 1.0f / scale_ : 0.0f; }

    // Σ x · level and Σ level², with the levels nearest to x · inverse()
    LKV_HD void refine(float xl, float ll) {
        if (fits() && xl > 0.0f && ll > 0.0f) scale_ = xl / ll;
    }

    LKV_HD uint8_t stored() const { return nearest_scale(scale_); }

private:
    LKV_HD bool fits() const { return scale_ > 1e-12f && scale_ < 1e12f; }

    float scale_;
};

// power += x² of a segment.
LKV_HD inline void add_power(const float* x, int width, Turns& power) {
#if defined(__CUDACC__)
    for (int i = adder(); i < width; i += adders) power = fmaf(x[i], x[i], power);
#else
    for (int i = 0; i < width; i += 2 * lanes) {
        for (int h = 0; h < 2; h++) {
            const f32x8 v = load8(x + i + h * lanes);
            power.of[h] = fma8(v, v, power.of[h]);
        }
    }
#endif
}

template <int Bits>
struct NormalFormat {
    static constexpr int width_multiple = chunk_width;
    static constexpr int block = 0;
    static constexpr bool quantized = true;
    static constexpr bool scaled_by_group = true;
    using Codes = Planes<Bits>;

    static constexpr int bits = Bits;
    static constexpr int scale_at = Bits >= 6 ? 3 : (Bits >= 3 ? 2 : Bits - 1);  // byte of the group
    static constexpr float step = read_step(Bits);
    static constexpr float z = 0.5f * Codes::levels;
    static constexpr float bottom = -z * step;
    static constexpr float level_step = normal_step(Bits);  // of what is fitted

    LKV_HD static constexpr int bytes(int width) { return round_up_to_word(width / chunk_width * Codes::chunk_bytes); }

    // group: from its first byte
    LKV_HD static Affine affine(const uint8_t* group, int /*block*/) {
        const float scale = scale_from_byte(group[scale_at]);
        return {scale * step, scale * bottom};
    }

    // The code whose level is nearest to x · inverse.
    LKV_HD static int nearest(float x, float inverse) {
        float code = fmaf(x, inverse * (1.0f / level_step), z + 0.5f);
        code = code > 0.0f ? code : 0.0f;
        code = code < Codes::levels ? code : float{Codes::levels};
        return static_cast<int>(code);
    }

    LKV_HD static float level_of(int code) { return fmaf(static_cast<float>(code), level_step, -z * level_step); }

    // The least scale that clips none. x: [width], width a multiple of 16. On a device by a warp.
    LKV_HD static float reach(const float* x, int width) {
        float low = 0.0f;
        float high = 0.0f;
        extremes(x, width, low, high);
        return (high > -low ? high : -low) / (z * level_step);
    }

    // xl += x · level, ll += level² of a segment, with the levels nearest to x · inverse.
    LKV_HD static void add_products(const float* x, int width, float inverse, Turns& xl, Turns& ll) {
#if defined(__CUDACC__)
#pragma unroll 4
        for (int i = adder(); i < width; i += adders) {
            const float level = level_of(nearest(x[i], inverse));
            xl = fmaf(x[i], level, xl);
            ll = fmaf(level, level, ll);
        }
#else
        for (int i = 0; i < width; i += 2 * lanes) {
            for (int h = 0; h < 2; h++) {
                const f32x8 v = load8(x + i + h * lanes);
                const f32x8 level = fma8(to_f32(nearest(v, inverse)), splat(level_step), splat(-z * level_step));
                xl.of[h] = fma8(v, level, xl.of[h]);
                ll.of[h] = fma8(level, level, ll.of[h]);
            }
        }
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
        const f32x8 code = fma8(x, splat(inverse * (1.0f / level_step)), splat(z + 0.5f));
        return __builtin_convertvector(min8(max8(code, f32x8{}), splat(Codes::levels)), i32x8);
    }
#endif
};

// The scale at byte At of a group. each(f) calls f(a value of a segment's type, its x, its width) for all segments that have it, in their
// order. On a device by a warp.
template <int At, class Each>
LKV_HD uint8_t group_scale(Each&& each) {
    if constexpr (At == NormalFormat<8>::scale_at) {
        float reach = 0.0f;
        each([&](auto f, const float* x, int width) {
            const float of = f.reach(x, width);
            reach = of > reach ? of : reach;
        });
        return scale_above(reach);
    } else {
        Turns power{};
        int n = 0;
        each([&](auto /*f*/, const float* x, int width) {
            add_power(x, width, power);
            n += width;
        });
        ScaleFit fit(total(power), n);
        for (int k = 0; k < ScaleFit::n_refine; k++) {
            Turns xl{};
            Turns ll{};
            each([&](auto f, const float* x, int width) { f.add_products(x, width, fit.inverse(), xl, ll); });
            fit.refine(total(xl), total(ll));
        }
        return fit.stored();
    }
}

// What codes are chosen for.
LKV_HD inline float inverse_of(uint8_t scale) { return scale > 0 ? 1.0f / scale_from_byte(scale) : 0.0f; }

}  // namespace lkv
