// ggml's blocks of 32 channels with codes of 4 or 5 bits: q4_0, q4_1, q5_0, q5_1, and the bytes of iq4_nl.
//
//   2 bytes         scale, f16
//   2 bytes         minimum, f16, in a format that has one
//   4 bytes         bit j of the little-endian word is the fifth bit of channel j, in a format of 5 bits
//   16 bytes        byte j: channel j in the low nibble, j + 16 in the high nibble, j = 0 … 15
//
//   value = code · scale + minimum     with a minimum: scale and minimum span the block
//   value = (code − 2^(Bits − 1)) · scale    without: the value of largest magnitude gets code 0, and scale its sign
//
// A width is a multiple of 32; a segment is rounded up to a multiple of 4 bytes. Same bytes and rounding as ggml's reference quantizers,
// except that a scale or a minimum past half_max saturates.
#pragma once

#include "cache/formats/format.h"

namespace lkv {

template <int Bits, bool HasMinimum>
struct StockBlocks {
    static_assert(Bits == 4 || Bits == 5);
    static constexpr int block = 32;
    static constexpr int width_multiple = block;
    static constexpr bool quantized = true;
    static constexpr int levels = (1 << Bits) - 1;  // largest code
    static constexpr float middle = (levels + 1) / 2;
    static constexpr int minimum_at = 2;
    static constexpr int fifth_at = HasMinimum ? 4 : 2;
    static constexpr int codes_at = fifth_at + (Bits == 5 ? 4 : 0);
    static constexpr int block_bytes = codes_at + block / 2;

    LKV_HD static constexpr int bytes(int width) { return round_up_to_word(width / block * block_bytes); }

    LKV_HD static void write(const float* x, int width, uint8_t* dst) {
#if defined(__CUDA_ARCH__)
        write_blocks(x, width / block, dst);
#else
        for (int k = 0; k < width / block; k++) {
            const float* const v = x + k * block;
            uint8_t* const out = dst + k * block_bytes;
            float low = 0.0f;
            float scale;
            if constexpr (HasMinimum) {
                float high;
                extremes(v, low, high);
                scale = (high - low) / levels;
                store_u16(out + minimum_at, half_saturate(low));
            } else {
                scale = extreme(v) / -middle;
            }
            store_u16(out, half_saturate(scale));
            const float inverse = inverse_of(scale);
            int code[block];
            for (int i = 0; i < block; i++) code[i] = code_of(v[i], low, inverse);
            put_codes(code, out);
        }
#endif
        pad(dst, width);
    }

    LKV_HD static Affine affine(const uint8_t* src, int k) {
        const float scale = load_half(src + k * block_bytes);
        if constexpr (HasMinimum) return {scale, load_half(src + k * block_bytes + minimum_at)};
        return {scale, -((levels + 1) / 2) * scale};
    }

    LKV_HD static float code(const uint8_t* src, int i) { return static_cast<float>(integer(src, i)); }

#if !defined(__CUDACC__)
    LKV_INLINE static f32x16 codes(const uint8_t* src, int chunk) {
        i32x8 lo;
        i32x8 hi;
        integers(src, chunk, lo, hi);
        return {to_f32(lo), to_f32(hi)};
    }
#endif

protected:
    LKV_HD static int integer(const uint8_t* src, int i) {
        const uint8_t* const p = src + i / block * block_bytes;
        const int j = i % block;
        const int nibble = p[codes_at + j % (block / 2)] >> (j < block / 2 ? 0 : 4) & 15;
        return Bits == 5 ? nibble | (p[fifth_at + j / 8] >> (j % 8) & 1) << 4 : nibble;
    }

#if !defined(__CUDACC__)
    // The codes of a chunk: one half of a block.
    LKV_INLINE static void integers(const uint8_t* src, int chunk, i32x8& lo, i32x8& hi) {
        const uint8_t* const p = src + chunk / 2 * block_bytes;
        const int shift = chunk % 2 * 4;
        lo = load8_u8(p + codes_at) >> shift & 15;
        hi = load8_u8(p + codes_at + lanes) >> shift & 15;
        if constexpr (Bits == 5) {
            constexpr i32x8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
            const uint8_t* const fifth = p + fifth_at + chunk % 2 * 2;
            lo |= ((i32x8{} + fifth[0]) >> lane & 1) << 4;
            hi |= ((i32x8{} + fifth[1]) >> lane & 1) << 4;
        }
    }
#endif

    // code: [32], 0 … levels; out: the block
    LKV_HD static void put_codes(const int* code, uint8_t* out) {
        for (int j = 0; j < block / 2; j++) {
            out[codes_at + j] = static_cast<uint8_t>((code[j] & 15) | (code[j + block / 2] & 15) << 4);
        }
        if constexpr (Bits == 5) {
            for (int byte = 0; byte < block / 8; byte++) {
                int bits = 0;
                for (int j = 0; j < 8; j++) bits |= (code[8 * byte + j] >> 4 & 1) << j;
                out[fifth_at + byte] = static_cast<uint8_t>(bits);
            }
        }
    }

    LKV_HD static void pad(uint8_t* dst, int width) {
        for (int i = width / block * block_bytes; i < bytes(width); i++) dst[i] = 0;
    }

    // The value of largest magnitude, the first of equal ones. v: [32]
    LKV_HD static float extreme(const float* v) {
        float peak = 0.0f;
        float found = 0.0f;
        for (int i = 0; i < block; i++) {
            const float a = v[i] < 0.0f ? -v[i] : v[i];
            found = a > peak ? v[i] : found;
            peak = a > peak ? a : peak;
        }
        return found;
    }

private:
    LKV_HD static void extremes(const float* v, float& low, float& high) {
        low = high = v[0];
        for (int i = 1; i < block; i++) {
            low = v[i] < low ? v[i] : low;
            high = v[i] > high ? v[i] : high;
        }
    }

    // 1/scale; 0 where that is beyond float's range, and the stored scale is 0.
    LKV_HD static float inverse_of(float scale) {
        constexpr float tiny = 1e-36f;
        return (scale < 0.0f ? -scale : scale) > tiny ? 1.0f / scale : 0.0f;
    }

    LKV_HD static int code_of(float x, float low, float inverse) {
        const int level =
            HasMinimum ? static_cast<int>((x - low) * inverse + 0.5f) : static_cast<int>(x * inverse + (middle + 0.5f));
        return level < levels ? level : levels;
    }

#if defined(__CUDA_ARCH__)
    // Lane l of a block has its channels 2·l, 2·l + 1 and those 16 further: two bytes of codes.
    __device__ static int channel(int i) { return 2 * block_lane() + i % 2 + i / 2 * (block / 2); }

    __device__ static void write_blocks(const float* x, int n_blocks, uint8_t* dst) {
        for (int first = 0; first < n_blocks; first += block_writers) {
            const int k = first + block_writer();
            const bool exists = k < n_blocks;  // lanes without a block take part in what the others combine
            float v[4];
            for (int i = 0; i < 4; i++) v[i] = exists ? x[k * block + channel(i)] : 0.0f;
            float low = 0.0f;
            float scale;
            if constexpr (HasMinimum) {
                low = least(v);
                const float minus[4] = {-v[0], -v[1], -v[2], -v[3]};
                scale = (-least(minus) - low) / levels;
            } else {
                scale = extreme_of_lanes(v) / -middle;
            }
            const float inverse = inverse_of(scale);
            int code[4];
            for (int i = 0; i < 4; i++) code[i] = code_of(v[i], low, inverse);
            uint32_t fifths = 0;
            for (int i = 0; Bits == 5 && i < 4; i++) fifths |= static_cast<uint32_t>(code[i] >> 4 & 1) << channel(i);
            if constexpr (Bits == 5) {
                fifths = float_bits(across<block_lanes>(float_from_bits(fifths), [](float a, float b) {
                    return float_from_bits(float_bits(a) | float_bits(b));
                }));
            }
            if (!exists) continue;
            uint8_t* const out = dst + k * block_bytes;
            if (block_lane() == 0) {
                store_u16(out, half_saturate(scale));
                if constexpr (HasMinimum) store_u16(out + minimum_at, half_saturate(low));
                for (int i = 0; Bits == 5 && i < 2; i++) {
                    store_u16(out + fifth_at + 2 * i, static_cast<uint16_t>(fifths >> (16 * i)));
                }
            }
            const auto byte = [&](int i) { return (code[i] & 15) | (code[i + 2] & 15) << 4; };
            store_u16(out + codes_at + 2 * block_lane(), static_cast<uint16_t>(byte(0) | byte(1) << 8));
        }
    }

    __device__ static float least(const float (&v)[4]) {
        float low = v[0];
        for (int i = 1; i < 4; i++) low = v[i] < low ? v[i] : low;
        return across<block_lanes>(low, [](float a, float b) { return b < a ? b : a; });
    }

    // As extreme: of channels with the largest magnitude the first one says the sign.
    __device__ static float extreme_of_lanes(const float (&v)[4]) {
        float peak = 0.0f;
        for (const float x : v) peak = fabsf(x) > peak ? fabsf(x) : peak;
        peak = across<block_lanes>(peak, [](float a, float b) { return a > b ? a : b; });
        float key = 2.0f * block;  // twice the channel, and one more where it is negative
        for (int i = 3; i >= 0; i--) {
            if (fabsf(v[i]) == peak) key = static_cast<float>(2 * channel(i) + (v[i] < 0.0f ? 1 : 0));
        }
        key = across<block_lanes>(key, [](float a, float b) { return a < b ? a : b; });
        return static_cast<int>(key) % 2 != 0 ? -peak : peak;
    }
#endif
};

}  // namespace lkv
