// q4_1: ggml's blocks of 32, one f16 scale and one f16 minimum each.   value = code · scale + minimum, code 0 … 15
//
//   byte 20·k + 0 … 1      scale of block k, f16
//   byte 20·k + 2 … 3      minimum, f16
//   byte 20·k + 4 … 19     codes of channels 32·k … 32·k + 31 (nibbles.h)
//
// width channels = width/32 · 20 bytes. Width a multiple of 32. Same bytes and rounding as ggml's reference quantizer, except
// that a scale or a minimum past half_max saturates.
#pragma once

#include "cache/formats/nibbles.h"

namespace lkv {

struct Q4_1 {
    static constexpr int block = nibble_block;
    static constexpr int width_multiple = block;
    static constexpr bool quantized = true;
    static constexpr int codes_at = 4;
    static constexpr int block_bytes = codes_at + block / 2;
    static_assert(block_bytes == 20, "ggml's block_q4_1");

    LKV_HD static constexpr int bytes(int width) { return width / block * block_bytes; }

    LKV_HD static void write(const float* x, int width, uint8_t* dst) {
        for (int k = writer(); k < width / block; k += writers) {
            const float* const v = x + k * block;
            uint8_t* out = dst + k * block_bytes;
            float low;
            float high;
            block_extremes(v, low, high);
            const float scale = (high - low) / 15.0f;
            const float inverse = block_inverse(scale);
            store_u16(out, half_saturate(scale));
            store_u16(out + 2, half_saturate(low));
            int code[block];
            for (int i = 0; i < block; i++) {
                const int level = static_cast<int>((v[i] - low) * inverse + 0.5f);
                code[i] = level < 15 ? level : 15;
            }
            put_nibbles(code, out + codes_at);
        }
    }

    LKV_HD static Affine affine(const uint8_t* src, int k) {
        return {load_half(src + k * block_bytes), load_half(src + k * block_bytes + 2)};
    }

    LKV_HD static float code(const uint8_t* src, int i) {
        return static_cast<float>(nibble(src + i / block * block_bytes + codes_at, i % block));
    }

#if !defined(__CUDACC__)
    LKV_INLINE static f32x16 codes(const uint8_t* src, int chunk) {
        i32x8 lo;
        i32x8 hi;
        load_nibbles(src + chunk / 2 * block_bytes + codes_at, chunk % 2, lo, hi);
        return {to_f32(lo), to_f32(hi)};
    }
#endif
};

}  // namespace lkv
