// Integer lanes for kernels that multiply codes: eight, or sixteen where the instructions have them. Host only.
#pragma once

#include "base/simd.h"

namespace lkv {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define LKV_AVX512 1
constexpr int wide_lanes = 16;
#else
constexpr int wide_lanes = 8;
#endif

template <int N>
struct WideOf;
template <>
struct WideOf<8> {
    using Unsigned = u32x8;
    using Signed = i32x8;
    using Float = f32x8;
};
template <>
struct WideOf<16> {
    using Unsigned = uint32_t __attribute__((vector_size(64)));
    using Signed = int32_t __attribute__((vector_size(64)));
    using Float = float __attribute__((vector_size(64)));
};

template <int N>
using Wide = typename WideOf<N>::Unsigned;
template <int N>
using WideInt = typename WideOf<N>::Signed;
template <int N>
using WideFloat = typename WideOf<N>::Float;

using f32xw = WideFloat<wide_lanes>;
using i32xw = WideInt<wide_lanes>;
using u32xw = Wide<wide_lanes>;
using i16x2w = int16_t __attribute__((vector_size(4 * wide_lanes)));

template <class Vector, class T>
LKV_INLINE Vector load_wide(const T* p) {
    Vector v;
    memcpy(&v, p, sizeof v);
    return v;
}

template <class Vector, class T>
LKV_INLINE void store_wide(T* p, Vector v) {
    memcpy(p, &v, sizeof v);
}

// The lanes of both, one after the other, of numbers that fit 16 bits.
LKV_INLINE i16x2w narrowed(i32xw a, i32xw b) {
#if defined(LKV_AVX512)
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);  // with a mask, as in widened()
    return (i16x2w)_mm512_maskz_permutexvar_epi64(0xff, order, _mm512_packs_epi32((__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
    return (i16x2w)_mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)a, (__m256i)b), 0b11011000);
#else
    i16x2w both;
    for (int i = 0; i < wide_lanes; i++) {
        both[i] = static_cast<int16_t>(a[i]);
        both[wide_lanes + i] = static_cast<int16_t>(b[i]);
    }
    return both;
#endif
}

template <int N>
LKV_INLINE WideFloat<N> signed_to_f32(Wide<N> v) {
    return __builtin_convertvector(std::bit_cast<WideInt<N>>(v), WideFloat<N>);
}

// a·b + c
LKV_INLINE f32xw fma_wide(f32xw a, f32xw b, f32xw c) {
#if defined(LKV_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#else
    return fma8(a, b, c);
#endif
}

// B bytes, a lane each, as often as N lanes hold them.
template <int N, int B>
LKV_INLINE Wide<N> widened(const uint8_t* p) {
    static_assert(N % B == 0 && (B == 4 || B == 8 || B == 16));
#if defined(__AVX2__)
    __m128i bytes;
    if constexpr (B == 4) {
        int32_t word;
        memcpy(&word, p, sizeof word);
        bytes = _mm_set1_epi32(word);
    } else if constexpr (B == 8) {
        long long word;
        memcpy(&word, p, sizeof word);
        bytes = _mm_set1_epi64x(word);
    } else {
        memcpy(&bytes, p, sizeof bytes);
    }
#if defined(LKV_AVX512)
    // without a mask GCC 12 warns that the instruction's unused operand is not initialised
    if constexpr (N == 16) return (Wide<16>)_mm512_maskz_cvtepu8_epi32(0xffff, bytes);
#endif
    if constexpr (N == 8) return (Wide<8>)_mm256_cvtepu8_epi32(bytes);
#else
    Wide<N> v;
    for (int i = 0; i < N; i++) v[i] = p[i % B];
    return v;
#endif
}

// Per lane: acc + the products of both 16-bit halves, signed, with those of `by`.
template <int N>
LKV_INLINE Wide<N> add_pairs(Wide<N> acc, Wide<N> pairs, int32_t by) {
#if defined(LKV_AVX512)
    if constexpr (N == 16) {
        const auto p = (__m512i)pairs;
#if defined(__AVX512VNNI__)
        return (Wide<N>)_mm512_dpwssd_epi32((__m512i)acc, p, _mm512_set1_epi32(by));
#else
        return acc + (Wide<N>)_mm512_madd_epi16(p, _mm512_set1_epi32(by));
#endif
    }
#endif
    if constexpr (N == 8) {
#if defined(LKV_AVX512) && defined(__AVX512VNNI__)
        return (Wide<N>)_mm256_dpwssd_epi32((__m256i)acc, (__m256i)pairs, _mm256_set1_epi32(by));
#elif defined(__AVXVNNI__)
        return (Wide<N>)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)pairs, _mm256_set1_epi32(by));
#elif defined(__AVX2__)
        return acc + (Wide<N>)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(by));
#elif defined(LKV_NEON)
        const auto p = std::bit_cast<int16x8x2_t>(pairs);
        const int16x8_t factors = vreinterpretq_s16_s32(vdupq_n_s32(by));
        int32x4x2_t sums;
        for (int i = 0; i < 2; i++) {
            sums.val[i] =
                vpaddq_s32(vmull_s16(vget_low_s16(p.val[i]), vget_low_s16(factors)), vmull_high_s16(p.val[i], factors));
        }
        return acc + std::bit_cast<Wide<N>>(sums);
#else
        const auto v = std::bit_cast<WideInt<N>>(pairs);
        const int32_t low = static_cast<int16_t>(by & 0xffff);
        return acc + std::bit_cast<Wide<N>>(((v << 16) >> 16) * low + (v >> 16) * (by >> 16));
#endif
    }
}

// Per lane: products of four codes, bytes of at most 15, with the four signed bytes of `by`, added to a partial sum. `most` is what a
// sum of products may reach before it has to be widened.
template <int N>
struct ByteDot {
#if (defined(LKV_AVX512) && defined(__AVX512VNNI__)) || defined(__AVXVNNI__) || !defined(__AVX2__)
    static constexpr int most = 0x7fffffff;
    static LKV_INLINE Wide<N> widen(Wide<N> sums) { return sums; }
#else
    // two sums of 16 bits a lane, of two products each
    static constexpr int most = 32767 / 2;
    static LKV_INLINE Wide<N> widen(Wide<N> sums) { return add_pairs<N>(Wide<N>{}, sums, 0x00010001); }
#endif

    static LKV_INLINE Wide<N> add(Wide<N> sums, Wide<N> codes, int32_t by) {
#if defined(LKV_AVX512) && defined(__AVX512VNNI__)
        if constexpr (N == 16)
            return (Wide<N>)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(by));
        if constexpr (N == 8) return (Wide<N>)_mm256_dpbusd_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(by));
#elif defined(LKV_AVX512)
        if constexpr (N == 16) {
            const __m512i products = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(by));
            return (Wide<N>)_mm512_add_epi16((__m512i)sums, products);
        }
#endif
#if defined(__AVXVNNI__)
        if constexpr (N == 8)
            return (Wide<N>)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(by));
#elif defined(__AVX2__)
        if constexpr (N == 8) {
            const __m256i products = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(by));
            return (Wide<N>)_mm256_add_epi16((__m256i)sums, products);
        }
#elif defined(LKV_NEON)
        const auto of = std::bit_cast<int8x16x2_t>(codes);
        const int8x16_t factors = vreinterpretq_s8_s32(vdupq_n_s32(by));
        auto out = std::bit_cast<int32x4x2_t>(sums);
        for (int i = 0; i < 2; i++) {
#if defined(__ARM_FEATURE_DOTPROD)
            out.val[i] = vdotq_s32(out.val[i], of.val[i], factors);
#else
            const int16x8_t low = vmull_s8(vget_low_s8(of.val[i]), vget_low_s8(factors));
            out.val[i] = vpadalq_s16(out.val[i], vpaddq_s16(low, vmull_high_s8(of.val[i], factors)));
#endif
        }
        return std::bit_cast<Wide<N>>(out);
#else
        const auto v = std::bit_cast<WideInt<N>>(codes);
        auto out = std::bit_cast<WideInt<N>>(sums);
        for (int i = 0; i < 4; i++) out += (v >> 8 * i & 0xff) * static_cast<int8_t>(by >> 8 * i);
        return std::bit_cast<Wide<N>>(out);
#endif
    }
};

// Halves in the low 16 bits; finite ones.
LKV_INLINE f32xw half_to_f32(u32xw h) {
    const f32xw magnitude = std::bit_cast<f32xw>((h & 0x7fffu) << 13) * 0x1p112f;
    return std::bit_cast<f32xw>(std::bit_cast<u32xw>(magnitude) | (h & 0x8000u) << 16);
}

template <class Combine>
LKV_INLINE f32x8 halved(f32xw v, [[maybe_unused]] Combine combine) {
#if defined(LKV_AVX512)
    return combine(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                   __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
#else
    return v;
#endif
}

LKV_INLINE float wide_sum(f32xw v) {
    return sum(halved(v, [](f32x8 a, f32x8 b) { return a + b; }));
}

LKV_INLINE float wide_max(f32xw v) {
    return max(halved(v, [](f32x8 a, f32x8 b) { return max8(a, b); }));
}

LKV_INLINE bool any(i32xw mask) {
    int32_t found = 0;
    for (int i = 0; i < wide_lanes; i++) found |= mask[i];
    return found != 0;
}

}  // namespace lkv
