// ops/cuda/mma.cuh on the emulated GPU.
#pragma once

#include <cuda_fp16.h>

namespace lkv::cuda {

inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated::Fragment own;
    const auto read = [](float* to, uint32_t word) {
        to[0] = __half2float({static_cast<uint16_t>(word)});
        to[1] = __half2float({static_cast<uint16_t>(word >> 16)});
    };
    for (int i = 0; i < 4; i++) read(own.a + 2 * i, a[i]);
    read(own.b, b0);
    read(own.b + 2, b1);
    std::memcpy(own.c, c, sizeof own.c);
    const uint64_t* const of = emulated::exchange(emulated::word_of(&own));
    if (emulated::lane() == 0) emulated::multiply(of);
    emulated::exchange(0);  // none goes on before all are multiplied
    std::memcpy(c, own.c, sizeof own.c);
}

template <bool transpose = false>
void load_four(uint32_t (&x)[4], const void* at) {
    const uint64_t* const rows = emulated::exchange(emulated::word_of(at));
    const int along = emulated::lane() % 4 * 2;
    const int across = emulated::lane() / 4;
    for (int m = 0; m < 4; m++) {
        x[m] = 0;
        for (int e = 0; e < 2; e++) {
            const auto* const row =
                emulated::from_word<const uint16_t*>(rows[8 * m + (transpose ? along + e : across)]);
            x[m] |= uint32_t{row[transpose ? across : along + e]} << 16 * e;
        }
    }
    emulated::exchange(0);
}
inline void load_a(uint32_t (&a)[4], const void* at, int pitch, int lane) {
    load_four(a, static_cast<const char*>(at) + (lane % 16) * pitch + lane / 16 * 16);
}
inline void load_a_transposed(uint32_t (&a)[4], const void* at, int pitch, int lane) {
    load_four<true>(a, static_cast<const char*>(at) + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16);
}
inline void load_b_pair(uint32_t (&b)[4], const void* at, int pitch, int lane) {
    load_four(b, static_cast<const char*>(at) + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16);
}

inline uint32_t transposed(uint32_t x) {
    const uint64_t* const of = emulated::exchange(x);
    const int g = emulated::lane() / 4;
    const int c = emulated::lane() % 4;
    const auto element = [&](int row) { return static_cast<uint32_t>(of[4 * row + g / 2] >> 16 * (g % 2) & 0xffff); };
    return element(2 * c) | element(2 * c + 1) << 16;
}

inline float power_of_two(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }
inline int forgotten(int x) { return x; }
inline uint32_t masked_xor(uint32_t x, uint32_t mask, uint32_t other) { return (x & mask) ^ other; }
inline uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t other) { return (x & mask) | other; }
inline void prefetch(const void*) {}

template <int n>
void copy_async(void* dst, const void* src) {
    if ((emulated::word_of(dst) | emulated::word_of(src)) % n != 0) emulated::fail("both addresses of a copy aligned");
    std::memcpy(dst, src, n);
}
inline void copies_commit() {}
inline void copies_wait(int) {}

}  // namespace lkv::cuda
