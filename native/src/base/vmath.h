// exp, sine and cosine of eight values.
#pragma once

#include "base/simd.h"

namespace lkv {

using f64x8 = double __attribute__((vector_size(64)));
using i64x8 = int64_t __attribute__((vector_size(64)));

// e^x for x <= 88; below −87 exactly 0. Relative error below 2e-7 (Cody-Waite reduction, Taylor to degree 7 on |r| <= ln2/2).
LKV_INLINE f32x8 exp8(f32x8 x) {
    constexpr float lowest = -87.0f;
    constexpr float round_bias = 12582912.0f;  // 1.5 · 2^23: adding it leaves the rounded integer in the low bits
    const f32x8 clamped = max8(x, splat(lowest));
    const f32x8 biased = fma8(clamped, splat(1.44269504f), splat(round_bias));
    const f32x8 n = biased - splat(round_bias);
    f32x8 r = fma8(n, splat(-0.693145752f), clamped);
    r = fma8(n, splat(-1.42860677e-6f), r);
    f32x8 y = splat(1.0f / 5040);
    y = fma8(y, r, splat(1.0f / 720));
    y = fma8(y, r, splat(1.0f / 120));
    y = fma8(y, r, splat(1.0f / 24));
    y = fma8(y, r, splat(1.0f / 6));
    y = fma8(y, r, splat(0.5f));
    y = fma8(y, r, splat(1.0f));
    y = fma8(y, r, splat(1.0f));
    const i32x8 exponent = std::bit_cast<i32x8>(biased) << 23;
    y = std::bit_cast<f32x8>(std::bit_cast<i32x8>(y) + exponent);
    return x < splat(lowest) ? f32x8{} : y;
}

// Absolute error below 2e-7.
LKV_INLINE f32x8 tanh8(f32x8 x) {
    constexpr float most = 10.0f;  // from where on it is 1
    const f32x8 bounded = -max8(-max8(x, splat(-most)), splat(-most));
    const f32x8 e = exp8(bounded + bounded);
    return (e - splat(1.0f)) / (e + splat(1.0f));
}

struct SinCos {
    f32x8 sin;
    f32x8 cos;
};

// Sine and cosine of angle · position, the angle given as quarter turns per position. The reduction is in double, so the error is that
// of the polynomials (below 2e-7) at any position an int32 holds.
LKV_INLINE SinCos sincos8(f64x8 position, double quarter_turns) {
    constexpr double round_bias = 6755399441055744.0;  // 1.5 · 2^52
    const f64x8 quarters = position * quarter_turns;
    const f64x8 biased = quarters + round_bias;
    const f32x8 r = __builtin_convertvector(quarters - (biased - round_bias), f32x8) * splat(1.57079633f);
    const i32x8 quadrant = __builtin_convertvector(std::bit_cast<i64x8>(biased), i32x8);
    const f32x8 r2 = r * r;
    f32x8 s = splat(1.0f / 362880);
    s = fma8(s, r2, splat(-1.0f / 5040));
    s = fma8(s, r2, splat(1.0f / 120));
    s = fma8(s, r2, splat(-1.0f / 6));
    s = fma8(s * r2, r, r);
    f32x8 c = splat(-1.0f / 3628800);
    c = fma8(c, r2, splat(1.0f / 40320));
    c = fma8(c, r2, splat(-1.0f / 720));
    c = fma8(c, r2, splat(1.0f / 24));
    c = fma8(c, r2, splat(-0.5f));
    c = fma8(c, r2, splat(1.0f));
    const i32x8 odd = (quadrant & 1) != 0;
    const f32x8 sine = odd ? c : s;
    const f32x8 cosine = odd ? s : c;
    return {(quadrant & 2) != 0 ? -sine : sine, ((quadrant + 1) & 2) != 0 ? -cosine : cosine};
}

}  // namespace lkv
