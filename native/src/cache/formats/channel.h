// c8 c4 c3 c2: one scale and one minimum per channel for a block of 32 tokens, b-bit codes, as KIVI stores K (Liu et al.
// 2024).   value = code · scale + minimum
//
// A block is 32 slots of a region, the first a multiple of 32, written together. Each slot's row has, in this segment,
//
//   byte 0 …             codes of the slot's own channels, 2·b bytes per 16 channels (planes.h)
//   byte width·b/8 …     its share of the block's 2·width numbers, f16: the scales of all channels, then the minima.
//                        Slot i of the block holds the width/16 numbers from i·width/16 on
//
// width channels = width·b/8 + width/8 bytes a slot, rounded up to a multiple of 4. Width a multiple of 16.
//
// Scale and minimum are chosen as for q8 … q2 (affine.h), over 32 tokens of one channel in place of one token's channels.
#pragma once

#include "cache/formats/affine.h"

namespace lkv {

constexpr int token_block_slots = 32;

template <int Bits>
struct ChannelFormat {
    static_assert(Bits > 1, "a lone 1-bit plane is read from 2 bytes before it, which are another segment's");

    static constexpr int width_multiple = chunk_width;
    static constexpr bool quantized = true;
    using Codes = Planes<Bits>;

    LKV_HD static constexpr int numbers_at(int width) { return width / chunk_width * Codes::chunk_bytes; }
    LKV_HD static constexpr int share(int width) { return 2 * width / token_block_slots; }  // numbers in a slot
    LKV_HD static constexpr int bytes(int width) { return round_up_to_word(numbers_at(width) + 2 * share(width)); }

    // Chooses a channel's scale and minimum, and stores them. tokens: [32], of one channel; dst: the segment in the row of the
    // block's first slot, rows `stride` bytes apart. On a device by a warp.
    LKV_HD static Affine put_affine(const float* tokens, int channel, int width, uint8_t* dst, int64_t stride) {
        const auto [scale, minimum] = AffineFormat<Bits>::choose(tokens, token_block_slots);
        store_u16(number(dst, stride, width, channel), scale);
        store_u16(number(dst, stride, width, width + channel), minimum);
        return {half_to_float(scale), half_to_float(minimum)};
    }

    LKV_HD static int32_t level(float x, float inverse, float minimum) {
        float level = (x - minimum) * inverse + 0.5f;
        level = level > 0.0f ? level : 0.0f;
        level = level < Codes::levels ? level : float{Codes::levels};
        return static_cast<int32_t>(level);
    }

    // After the numbers of one slot. dst: the segment in its row.
    LKV_HD static void pad(uint8_t* dst, int width) {
        for (int b = numbers_at(width) + 2 * share(width); b < bytes(width); b++) dst[b] = 0;
    }

    // block: the segment in the row of the block's first slot, src: in the slot's own.
    LKV_HD static float value(const uint8_t* block, int64_t stride, const uint8_t* src, int width, int channel) {
        const float scale = load_half(number(block, stride, width, channel));
        const float minimum = load_half(number(block, stride, width, width + channel));
        const int code = Codes::get(src + channel / chunk_width * Codes::chunk_bytes, channel % chunk_width);
        return fmaf(static_cast<float>(code), scale, minimum);
    }

#if !defined(__CUDACC__)
    // x: [32, ld], ld >= width -> dst: the segment in the row of the block's first slot; rows are `stride` bytes apart.
    static void write(const float* x, int ld, int width, uint8_t* dst, int64_t stride) {
        for (int first = 0; first < width; first += chunk_width) {
            int32_t code[token_block_slots][chunk_width];
            for (int j = 0; j < chunk_width; j++) {
                float tokens[token_block_slots];  // of one channel
                for (int i = 0; i < token_block_slots; i++) tokens[i] = x[int64_t{i} * ld + first + j];
                const auto [scale, minimum] = put_affine(tokens, first + j, width, dst, stride);
                const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
                for (int i = 0; i < token_block_slots; i++) code[i][j] = level(tokens[i], inverse, minimum);
            }
            for (int i = 0; i < token_block_slots; i++) {
                Codes::pack(code[i], dst + i * stride + first / chunk_width * Codes::chunk_bytes);
            }
        }
        for (int i = 0; i < token_block_slots; i++) pad(dst + i * stride, width);
    }

    // Scales and minima of channels first … first + n − 1, n and first multiples of 16. block: the segment in the row of
    // the block's first slot.
    static void affine(const uint8_t* block, int64_t stride, int width, int first, int n, float* scale,
                       float* minimum) {
        read_numbers(block, stride, width, first, n, scale);
        read_numbers(block, stride, width, width + first, n, minimum);
    }

    LKV_INLINE static f32x16 codes(const uint8_t* src, int chunk) {
        return Codes::unpack(src + chunk * Codes::chunk_bytes);
    }

private:
    static constexpr int span = 128;  // numbers gathered at a time

    // Numbers first … first + n − 1 of the block.
    static void read_numbers(const uint8_t* block, int64_t stride, int width, int first, int n, float* dst) {
        const int in_slot = share(width);
        if (in_slot % lanes == 0 && first % in_slot == 0) {  // heads of 128, 256, …
            const uint8_t* slot = number(block, stride, width, first);
            for (int k = 0; k < n; slot += stride) {
                for (int i = 0; i < in_slot && k < n; i += lanes, k += lanes) store8(dst + k, load8_half(slot + 2 * i));
            }
        } else if (in_slot == 4) {  // heads of 64
            const uint8_t* slot = number(block, stride, width, first);
            for (int k = 0; k < n; k += lanes, slot += 2 * stride) {
                store8(dst + k, load4_half_twice(slot, slot + stride));
            }
        } else {
            gather_numbers(block, stride, width, first, n, dst);
        }
    }

    static void gather_numbers(const uint8_t* block, int64_t stride, int width, int first, int n, float* dst) {
        const int in_slot = share(width);
        uint8_t halves[2 * span];
        for (int begin = 0; begin < n; begin += span) {
            const int end = n - begin < span ? n - begin : span;
            int at = (first + begin) % in_slot;
            const uint8_t* slot = number(block, stride, width, first + begin - at);
            for (int k = 0; k < end; slot += stride, at = 0) {
                for (; at < in_slot && k < end; at++, k++) memcpy(halves + 2 * k, slot + 2 * at, 2);
            }
            for (int k = 0; k < end; k += lanes) store8(dst + begin + k, load8_half(halves + 2 * k));
        }
    }
#endif

    // Where number k of the block is.
    template <class Byte>
    LKV_HD static Byte* number(Byte* block, int64_t stride, int width, int k) {
        return block + k / share(width) * stride + numbers_at(width) + 2 * (k % share(width));
    }
};

}  // namespace lkv
