// q5_0: ggml's blocks of 32, one f16 scale each.   value = (code − 16) · scale, code 0 … 31
//
//   byte 22·k + 0 … 1      scale of block k, f16, negative when the largest magnitude is positive
//   byte 22·k + 2 … 5      fifth bits of channels 32·k … 32·k + 31 (nibbles.h)
//   byte 22·k + 6 … 21     their other bits
//
// width channels = width/32 · 22 bytes, rounded up to a multiple of 4. Width a multiple of 32. Same bytes and rounding as
// ggml's reference quantizer, except that a scale past half_max saturates.
#pragma once

#include "cache/formats/nibbles.h"

namespace lkv {

struct Q5_0 {
    static constexpr int block = nibble_block;
    static constexpr int width_multiple = block;
    static constexpr bool quantized = true;
    static constexpr int fifth_at = 2;
    static constexpr int codes_at = 6;
    static constexpr int block_bytes = codes_at + block / 2;
    static_assert(block_bytes == 22, "ggml's block_q5_0");

    LKV_HD static constexpr int bytes(int width) { return round_up_to_word(width / block * block_bytes); }

    LKV_HD static void write(const float* x, int width, uint8_t* dst) {
        const int n_blocks = width / block;
        for (int k = writer(); k < n_blocks; k += writers) {
            const float* const v = x + k * block;
            uint8_t* out = dst + k * block_bytes;
            const float scale = block_extreme(v) / -16.0f;  // the largest magnitude gets code 0, so that −16 is used
            const float inverse = block_inverse(scale);
            store_u16(out, half_saturate(scale));
            int code[block];
            for (int i = 0; i < block; i++) {
                const int level = static_cast<int>(v[i] * inverse + 16.5f);
                code[i] = level < 31 ? level : 31;
            }
            put_fifth_bits(code, out + fifth_at);
            put_nibbles(code, out + codes_at);
        }
        for (int i = n_blocks * block_bytes; i < bytes(width); i++) {
            dst[i] = 0;
        }
    }

    LKV_HD static Affine affine(const uint8_t* src, int k) {
        const float scale = load_half(src + k * block_bytes);
        return {scale, -16.0f * scale};
    }

    LKV_HD static float code(const uint8_t* src, int i) {
        const uint8_t* const p = src + i / block * block_bytes;
        return static_cast<float>(nibble(p + codes_at, i % block) | fifth_bit(p + fifth_at, i % block));
    }

#if !defined(__CUDACC__)
    LKV_INLINE static f32x16 codes(const uint8_t* src, int chunk) {
        const uint8_t* const p = src + chunk / 2 * block_bytes;
        i32x8 lo;
        i32x8 hi;
        load_nibbles(p + codes_at, chunk % 2, lo, hi);
        add_fifth_bits(p + fifth_at, chunk % 2, lo, hi);
        return {to_f32(lo), to_f32(hi)};
    }
#endif
};

}  // namespace lkv
