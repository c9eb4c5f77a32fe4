// q4_0: ggml's blocks of 32, one f16 scale each.   value = (code − 8) · scale, code 0 … 15
//
//   byte 18·k + 0 … 1      scale of block k, f16, negative when the largest magnitude is positive
//   byte 18·k + 2 + j      channel 32·k + j in the low nibble, 32·k + j + 16 in the high nibble, j = 0 … 15
//
// width channels = width/32 · 18 bytes, rounded up to a multiple of 4. Width a multiple of 32. Same bytes and rounding
// as ggml's reference quantizer, except that a scale past half_max saturates.
#pragma once

#include "cache/formats/format.h"

namespace lkv {

struct Q4_0 {
    static constexpr int block = 32;
    static constexpr int width_multiple = block;
    static constexpr bool quantized = true;
    static constexpr int codes_at = 2;
    static constexpr float tiny = 1e-36f;  // stored scale is zero far above this; below it 1/scale overflows
    static constexpr int block_bytes = codes_at + block / 2;
    static_assert(block_bytes == 18, "ggml's block_q4_0");

    LKV_HD static constexpr int bytes(int width) { return round_up_to_word(width / block * block_bytes); }

    LKV_HD static void write(const float* x, int width, uint8_t* dst) {
        const int n_blocks = width / block;
        for (int k = writer(); k < n_blocks; k += writers) {
            const float* const v = x + k * block;
            uint8_t* out = dst + k * block_bytes;
            float peak = 0.0f;
            float extreme = 0.0f;  // the value of largest magnitude: it gets code 0, so that −8 is used
            for (int i = 0; i < block; i++) {
                const float a = v[i] < 0.0f ? -v[i] : v[i];
                extreme = a > peak ? v[i] : extreme;
                peak = a > peak ? a : peak;
            }
            const float scale = extreme / -8.0f;
            const float inverse = peak > tiny ? 1.0f / scale : 0.0f;
            store_u16(out, half_saturate(scale));
            for (int j = 0; j < block / 2; j++) {
                const int low = nearest(v[j] * inverse);
                const int high = nearest(v[j + block / 2] * inverse);
                out[codes_at + j] = static_cast<uint8_t>(low | high << 4);
            }
        }
        for (int i = n_blocks * block_bytes; i < bytes(width); i++) {
            dst[i] = 0;
        }
    }

    LKV_HD static Affine affine(const uint8_t* src, int k) {
        const float scale = load_half(src + k * block_bytes);
        return {scale, -8.0f * scale};
    }

    LKV_HD static float code(const uint8_t* src, int i) {
        const int byte = src[i / block * block_bytes + codes_at + i % (block / 2)];
        return static_cast<float>(i % block < block / 2 ? byte & 15 : byte >> 4);
    }

#if !defined(__CUDACC__)
    LKV_INLINE static f32x16 codes(const uint8_t* src, int chunk) {
        const uint8_t* p = src + chunk / 2 * block_bytes + codes_at;
        const int shift = chunk % 2 * 4;
        return {to_f32(load8_u8(p) >> shift & 15), to_f32(load8_u8(p + lanes) >> shift & 15)};
    }
#endif

private:
    LKV_HD static int nearest(float x) {
        const int code = static_cast<int>(x + 8.5f);
        return code < 15 ? code : 15;
    }
};

}  // namespace lkv
