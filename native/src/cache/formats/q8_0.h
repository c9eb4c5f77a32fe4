// q8_0: ggml's blocks of 32, one f16 scale each.   value = code · scale, code −127 … 127
//
//   byte 34·k + 0 … 1      scale of block k, f16
//   byte 34·k + 2 … 33     codes of channels 32·k … 32·k + 31, int8
//
// width channels = width/32 · 34 bytes, rounded up to a multiple of 4. Width a multiple of 32. Same bytes and rounding
// as ggml's reference quantizer, except that a scale past half_max saturates.
#pragma once

#include "cache/formats/format.h"

namespace lkv {

struct Q8_0 {
    static constexpr int block = 32;
    static constexpr int width_multiple = block;
    static constexpr bool quantized = true;
    static constexpr int codes_at = 2;
    static constexpr float tiny = 1e-36f;  // stored scale is zero far above this; below it 1/scale overflows
    static constexpr int block_bytes = codes_at + block;
    static_assert(block_bytes == 34, "ggml's block_q8_0");

    LKV_HD static constexpr int bytes(int width) { return round_up_to_word(width / block * block_bytes); }

    LKV_HD static void write(const float* x, int width, uint8_t* dst) {
        const int n_blocks = width / block;
        for (int k = writer(); k < n_blocks; k += writers) {
            const float* const v = x + k * block;
            uint8_t* out = dst + k * block_bytes;
            float peak[chunk_width] = {};
            for (int i = 0; i < block; i++) {
                const float a = v[i] < 0.0f ? -v[i] : v[i];
                peak[i % chunk_width] = a > peak[i % chunk_width] ? a : peak[i % chunk_width];
            }
            for (int j = 1; j < chunk_width; j++) {
                peak[0] = peak[j] > peak[0] ? peak[j] : peak[0];
            }
            const float scale = peak[0] / 127.0f;
            const float inverse = scale > tiny ? 1.0f / scale : 0.0f;
            store_u16(out, half_saturate(scale));
            for (int i = 0; i < block; i++) {
                out[codes_at + i] = static_cast<uint8_t>(round_half_away(v[i] * inverse));
            }
        }
        for (int i = n_blocks * block_bytes; i < bytes(width); i++) {
            dst[i] = 0;
        }
    }

    LKV_HD static Affine affine(const uint8_t* src, int k) { return {load_half(src + k * block_bytes), 0.0f}; }

    LKV_HD static float code(const uint8_t* src, int i) {
        return static_cast<float>(static_cast<int8_t>(src[i / block * block_bytes + codes_at + i % block]));
    }

#if !defined(__CUDACC__)
    LKV_INLINE static f32x16 codes(const uint8_t* src, int chunk) {
        const uint8_t* p = src + chunk / 2 * block_bytes + codes_at + chunk % 2 * chunk_width;
        return {to_f32(load8_i8(p)), to_f32(load8_i8(p + lanes))};
    }
#endif

private:
    // roundf, in a form that vectorises
    LKV_HD static int8_t round_half_away(float x) {
        const int whole = static_cast<int>(x);
        const float rest = x - static_cast<float>(whole);
        return static_cast<int8_t>(whole + (rest >= 0.5f) - (rest <= -0.5f));
    }
};

}  // namespace lkv
