// iq4_nl: ggml's blocks of 32, one f16 scale each and 16 levels that lie closer around 0.   value = level[code] · scale
//
//   byte 18·k + 0 … 1      scale of block k
//   byte 18·k + 2 … 17     codes of channels 32·k … 32·k + 31 (stock_blocks.h)
//
// Scale and codes are those of ggml's reference quantizer: codes for the scale that spans the block, then the scale of least squared
// error for these, each value weighed by its square. Both are found in units of the largest value: rounding differs in the last bit.
#pragma once

#include "cache/formats/stock_blocks.h"

namespace lkv {

struct IQ4_NL : StockBlocks<4, false> {
    static constexpr float least_peak = 1e-15f;  // ggml's GROUP_MAX_EPS: a block below it is stored as zeros
    static_assert(block_bytes == 18, "ggml's block_iq4_nl");

    LKV_HD static float level(int code) {
        constexpr int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        return static_cast<float>(values[code]);
    }

    // The code whose level is nearest to x, the greater of two.
    LKV_HD static int nearest(float x) {
        int code = 0;
        while (code < 15 && x - level(code) >= level(code + 1) - x) code++;
        return code;
    }

    LKV_HD static void write(const float* x, int width, uint8_t* dst) {
        for (int k = writer(); k < width / block; k += writers) {
            const float* const v = x + k * block;
            uint8_t* const out = dst + k * block_bytes;
            const float largest = extreme(v);
            const bool is_zero = !((largest < 0.0f ? -largest : largest) >= least_peak);
            float xq = 0.0f;
            float qq = 0.0f;
            int code[block];
            for (int i = 0; i < block; i++) {
                const float u =
                    is_zero ? 0.0f : v[i] / largest;  // the squares of large values are beyond float's range
                code[i] = nearest(u * level(0));
                const float q = level(code[i]);
                xq += u * u * q * u;
                qq += u * u * q * q;
            }
            store_u16(out, half_saturate(qq > 0.0f ? xq / qq * largest : 0.0f));
            put_codes(code, out);
        }
        pad(dst, width);
    }

    LKV_HD static Affine affine(const uint8_t* src, int k) { return {load_half(src + k * block_bytes), 0.0f}; }

    LKV_HD static float code(const uint8_t* src, int i) { return level(integer(src, i)); }

#if !defined(__CUDACC__)
    LKV_INLINE static f32x16 codes(const uint8_t* src, int chunk) {
        i32x8 lo;
        i32x8 hi;
        integers(src, chunk, lo, hi);
        f32x16 out;
        for (int i = 0; i < lanes; i++) {
            out.lo[i] = level(lo[i]);
            out.hi[i] = level(hi[i]);
        }
        return out;
    }
#endif
};

}  // namespace lkv
