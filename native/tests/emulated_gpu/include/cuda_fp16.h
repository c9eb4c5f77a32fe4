// f16 on the emulated GPU.
#pragma once

#include <cuda_runtime_api.h>

struct __half {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};

inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline float __half2float(__half x) { return emulated::half_values[x.bits]; }
// Once, from exact sums and products.
inline __half emulated_half(double x) { return {static_cast<uint16_t>(emulated::word_of(static_cast<_Float16>(x)))}; }
inline __half __float2half_rn(float x) { return emulated_half(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {emulated_half(x), emulated_half(y)}; }
inline __half2 __float2half2_rn(float x) { return __floats2half2_rn(x, x); }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }

inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    const auto one = [](__half x, __half y, __half z) {
        return emulated_half(double{__half2float(x)} * __half2float(y) + __half2float(z));
    };
    return {one(a.x, b.x, c.x), one(a.y, b.y, c.y)};
}
inline __half2 __hneg2(__half2 x) {
    return {{static_cast<uint16_t>(x.x.bits ^ 0x8000)}, {static_cast<uint16_t>(x.y.bits ^ 0x8000)}};
}
inline __half2 __hmul2(__half2 a, __half2 b) {
    const __half minus_zero{0x8000};
    return __hfma2(a, b, {minus_zero, minus_zero});
}
inline __half2 __hsub2(__half2 a, __half2 b) {
    const __half one{0x3c00};
    return __hfma2(a, {one, one}, __hneg2(b));
}
inline __half2 __hmin2(__half2 a, __half2 b) {
    const auto one = [](__half x, __half y) { return __half2float(y) < __half2float(x) ? y : x; };
    return {one(a.x, b.x), one(a.y, b.y)};
}
