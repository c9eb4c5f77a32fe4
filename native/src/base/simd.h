// Eight floats at a time, through the compiler's vector types; intrinsics only where those compile poorly. Host only.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#define LKV_NEON 1
#endif

#include "base/half.h"

#define LKV_INLINE __attribute__((always_inline)) inline

// Before a loop over a local array of vectors: without it GCC keeps the array in memory around the loop that uses it.
#if defined(__clang__)
#define LKV_UNROLL _Pragma("unroll")
#else
#define LKV_UNROLL _Pragma("GCC unroll 16")
#endif

namespace lkv {

using f32x8 = float __attribute__((vector_size(32)));
using i32x8 = int32_t __attribute__((vector_size(32)));
using u32x8 = uint32_t __attribute__((vector_size(32)));

constexpr int lanes = 8;

struct f32x16 {
    f32x8 lo;
    f32x8 hi;
};

LKV_INLINE f32x8 splat(float x) { return f32x8{x, x, x, x, x, x, x, x}; }

LKV_INLINE f32x8 load8(const float* p) {
    f32x8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

LKV_INLINE void store8(float* p, f32x8 v) { memcpy(p, &v, sizeof v); }

// Stops GCC from folding a load into each of its uses: two load ports starve two FMA units.
LKV_INLINE void keep_in_register([[maybe_unused]] f32x8& v) {
#if defined(__AVX__)
    __asm__("" : "+x"(v));
#endif
}

// a·b + c
LKV_INLINE f32x8 fma8(f32x8 a, f32x8 b, f32x8 c) {
#if defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(LKV_NEON)
    const auto x = std::bit_cast<float32x4x2_t>(a);
    const auto y = std::bit_cast<float32x4x2_t>(b);
    const auto z = std::bit_cast<float32x4x2_t>(c);
    return std::bit_cast<f32x8>(
        float32x4x2_t{{vfmaq_f32(z.val[0], x.val[0], y.val[0]), vfmaq_f32(z.val[1], x.val[1], y.val[1])}});
#else
    return a * b + c;
#endif
}

LKV_INLINE f32x8 max8(f32x8 a, f32x8 b) { return a > b ? a : b; }
LKV_INLINE f32x8 min8(f32x8 a, f32x8 b) { return a < b ? a : b; }

LKV_INLINE f32x8 to_f32(i32x8 v) { return __builtin_convertvector(v, f32x8); }

LKV_INLINE f32x8 load8_half(const uint8_t* p) {
#if defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(LKV_NEON)
    const float16x8_t h = vreinterpretq_f16_u8(vld1q_u8(p));
    return std::bit_cast<f32x8>(float32x4x2_t{{vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)}});
#else
    f32x8 v;
    for (int i = 0; i < lanes; i++) {
        v[i] = load_half(p + 2 * i);
    }
    return v;
#endif
}

// Eight halves that lie in two places, four and four.
LKV_INLINE f32x8 load4_half_twice(const uint8_t* p, const uint8_t* q) {
    using u64x2 = uint64_t __attribute__((vector_size(16)));
    uint64_t a;
    uint64_t b;
    memcpy(&a, p, sizeof a);
    memcpy(&b, q, sizeof b);
    const u64x2 v = {a, b};
#if defined(__F16C__)
    return _mm256_cvtph_ps(std::bit_cast<__m128i>(v));
#else
    return load8_half(reinterpret_cast<const uint8_t*>(&v));
#endif
}

LKV_INLINE void store8_half(uint8_t* p, f32x8 v) {
#if defined(__F16C__)
    const __m128i h = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    memcpy(p, &h, sizeof h);
#elif defined(LKV_NEON)
    const auto halves = std::bit_cast<float32x4x2_t>(v);
    vst1q_u8(p, vreinterpretq_u8_f16(vcvt_high_f16_f32(vcvt_f16_f32(halves.val[0]), halves.val[1])));
#else
    for (int i = 0; i < lanes; i++) {
        store_u16(p + 2 * i, half_from_float(v[i]));
    }
#endif
}

LKV_INLINE i32x8 load8_u8(const uint8_t* p) {
#if defined(__AVX2__)
    return std::bit_cast<i32x8>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(LKV_NEON)
    const uint16x8_t words = vmovl_u8(vld1_u8(p));
    return std::bit_cast<i32x8>(uint32x4x2_t{{vmovl_u16(vget_low_u16(words)), vmovl_high_u16(words)}});
#else
    i32x8 v;
    for (int i = 0; i < lanes; i++) {
        v[i] = p[i];
    }
    return v;
#endif
}

LKV_INLINE i32x8 load8_i8(const uint8_t* p) {
#if defined(__AVX2__)
    return std::bit_cast<i32x8>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(LKV_NEON)
    const int16x8_t words = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
    return std::bit_cast<i32x8>(int32x4x2_t{{vmovl_s16(vget_low_s16(words)), vmovl_high_s16(words)}});
#else
    i32x8 v;
    for (int i = 0; i < lanes; i++) {
        v[i] = static_cast<int8_t>(p[i]);
    }
    return v;
#endif
}

// Lane j of r[i] and lane i of r[j] change places. Vectors of eight.
template <class Vector>
LKV_INLINE void transpose8(Vector (&r)[8]) {
    Vector t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    Vector u[8];
    for (int i = 0; i < 8; i += 4) {
        u[i] = __builtin_shufflevector(t[i], t[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        u[i + 1] = __builtin_shufflevector(t[i], t[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        u[i + 2] = __builtin_shufflevector(t[i + 1], t[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
        u[i + 3] = __builtin_shufflevector(t[i + 1], t[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = __builtin_shufflevector(u[i], u[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        r[i + 4] = __builtin_shufflevector(u[i], u[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

LKV_INLINE float sum(f32x8 v) {
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    return v[0] + v[1];
}

LKV_INLINE float max(f32x8 v) {
    v = max8(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = max8(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    return v[0] > v[1] ? v[0] : v[1];
}

}  // namespace lkv
