// f32: values as computed; the cache that comparisons against another program's logits use.
//
//   byte 4·i … 4·i+3   channel i, little-endian
//
// width channels = 4·width bytes. Any width.
#pragma once

#include <cstring>

#include "cache/formats/format.h"

namespace lkv {

struct F32 {
    static constexpr int width_multiple = 1;
    static constexpr int block = 0;
    static constexpr bool quantized = false;

    LKV_HD static constexpr int bytes(int width) { return 4 * width; }

    LKV_HD static void write(const float* x, int width, uint8_t* dst) {
#if defined(__CUDA_ARCH__)
        for (int i = writer(); i < width; i += writers) memcpy(dst + 4 * i, x + i, sizeof(float));
#else
        memcpy(dst, x, static_cast<size_t>(bytes(width)));
#endif
    }

    LKV_HD static Affine affine(const uint8_t*, int) { return {1.0f, 0.0f}; }

    LKV_HD static float code(const uint8_t* src, int i) {
        float value;
        memcpy(&value, src + 4 * i, sizeof value);
        return value;
    }

#if !defined(__CUDACC__)
    LKV_INLINE static f32x16 codes(const uint8_t* src, int chunk) {
        const auto* p = reinterpret_cast<const float*>(src) + chunk_width * chunk;
        return {load8(p), load8(p + lanes)};
    }
#endif
};

}  // namespace lkv
