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
#if defined(__CUDA_ARCH__)
        write_blocks(x, n_blocks, dst);
#else
        for (int k = 0; k < n_blocks; k++) {
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
            const float inverse = inverse_of(scale);
            store_u16(out, half_saturate(scale));
            for (int i = 0; i < block; i++) {
                out[codes_at + i] = static_cast<uint8_t>(round_half_away(v[i] * inverse));
            }
        }
#endif
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
    LKV_HD static float inverse_of(float scale) { return scale > tiny ? 1.0f / scale : 0.0f; }

#if defined(__CUDA_ARCH__)
    // Lane l of a block has its channels 4·l … 4·l + 3.
    __device__ static void write_blocks(const float* x, int n_blocks, uint8_t* dst) {
        for (int first = 0; first < n_blocks; first += block_writers) {
            const int k = first + block_writer();
            const bool exists = k < n_blocks;  // lanes without a block take part in what the others combine
            float v[4];
            float peak = 0.0f;
            for (int i = 0; i < 4; i++) {
                v[i] = exists ? x[k * block + 4 * block_lane() + i] : 0.0f;
                const float a = v[i] < 0.0f ? -v[i] : v[i];
                peak = a > peak ? a : peak;
            }
            const float scale = across<block_lanes>(peak, [](float a, float b) { return a > b ? a : b; }) / 127.0f;
            const float inverse = inverse_of(scale);
            if (!exists) continue;
            uint8_t* const out = dst + k * block_bytes;
            if (block_lane() == 0) store_u16(out, half_saturate(scale));
            for (int i = 0; i < 4; i += 2) {
                const auto low = static_cast<uint8_t>(round_half_away(v[i] * inverse));
                const auto high = static_cast<uint8_t>(round_half_away(v[i + 1] * inverse));
                store_u16(out + codes_at + 4 * block_lane() + i, static_cast<uint16_t>(low | high << 8));
            }
        }
    }
#endif

    // roundf, in a form that vectorises
    LKV_HD static int8_t round_half_away(float x) {
        const int whole = static_cast<int>(x);
        const float rest = x - static_cast<float>(whole);
        return static_cast<int8_t>(whole + (rest >= 0.5f) - (rest <= -0.5f));
    }
};

}  // namespace lkv
