// IEEE half precision on the host and on the device, with the directed roundings that quantized formats need.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define LKV_HD __host__ __device__
#else
#define LKV_HD
#endif

#if defined(__F16C__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif

namespace lkv {

constexpr float half_max = 65504.0f;

LKV_HD inline uint32_t float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

LKV_HD inline float float_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

LKV_HD inline float half_to_float(uint16_t h) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(h));
#elif defined(__F16C__) && !defined(__CUDACC__)
    return _cvtsh_ss(h);
#else
    const uint32_t sign = (h & 0x8000u) << 16;
    const uint32_t magnitude = h & 0x7fffu;
    // Multiplying by 2^112 moves the exponent bias from 15 to 127 and normalises subnormals.
    const float finite = float_from_bits(magnitude << 13) * 0x1p112f;
    const uint32_t bits = magnitude >= 0x7c00u ? (0x7f800000u | (magnitude << 13)) : float_bits(finite);
    return float_from_bits(sign | bits);
#endif
}

// Nearest even; past half_max it rounds to infinity as IEEE says.
LKV_HD inline uint16_t half_from_float(float x) {
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(x));
#elif defined(__F16C__) && !defined(__CUDACC__)
    return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    const uint32_t u = float_bits(x);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return static_cast<uint16_t>(sign | 0x7e00u);
    }
    if (magnitude >= 0x477ff000u) {  // 65520, the midpoint above half_max
        return static_cast<uint16_t>(sign | 0x7c00u);
    }
    if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the subnormal code in the low bits
        return static_cast<uint16_t>(sign | (float_bits(float_from_bits(magnitude) + 0.5f) - 0x3f000000u));
    }
    const uint32_t odd = (magnitude >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
#endif
}

// Nearest even, saturating to ±half_max: a cache never stores an infinity.
LKV_HD inline uint16_t half_saturate(float x) {
    return half_from_float(x > half_max ? half_max : (x < -half_max ? -half_max : x));
}

// The largest half <= x, saturating.
LKV_HD inline uint16_t half_floor(float x) {
    const uint16_t h = half_saturate(x);
    const float y = half_to_float(h);
    if (y <= x || y <= -half_max) {
        return h;
    }
    if ((h & 0x7fffu) == 0) {
        return 0x8001u;  // just below zero: the smallest negative subnormal
    }
    return static_cast<uint16_t>((h & 0x8000u) ? h + 1 : h - 1);
}

// The smallest half >= x, saturating.
LKV_HD inline uint16_t half_ceil(float x) { return static_cast<uint16_t>(half_floor(-x) ^ 0x8000u); }

// On a device a copy of two bytes becomes two accesses; every half of a row lies on an even byte.
LKV_HD inline uint16_t load_u16(const uint8_t* p) {
#if defined(__CUDA_ARCH__)
    return *reinterpret_cast<const uint16_t*>(p);
#else
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return h;
#endif
}

LKV_HD inline void store_u16(uint8_t* p, uint16_t h) {
#if defined(__CUDA_ARCH__)
    *reinterpret_cast<uint16_t*>(p) = h;
#else
    memcpy(p, &h, sizeof h);
#endif
}

LKV_HD inline float load_half(const uint8_t* p) { return half_to_float(load_u16(p)); }

}  // namespace lkv
