// Rows on the device: new rows quantized and stored, rows of one region requantized into another.
#pragma once

#include "cache/formats.h"
#include "ops/cuda/args.h"

namespace lkv::cuda {

constexpr int row_threads = 1024;

// The device's write_segment: all lanes of a warp enter with the same arguments.
__device__ inline void write_segment_shared(int32_t format, const float* x, int width, uint8_t* dst) {
    switch (static_cast<Format>(format)) {
        case Format::none:
            return;
#define X(name, type)               \
    case Format::name:              \
        type::write(x, width, dst); \
        return;
            LKV_STORED_FORMATS(X)
#undef X
    }
}

template <class F>
__device__ inline float value_of(const uint8_t* src, int i) {
    const float code = F::code(src, i);
    if constexpr (!F::quantized) return code;
    constexpr int block = F::block > 0 ? F::block : 1 << 30;
    const Affine a = F::affine(src, i / block);
    return fmaf(code, a.scale, a.offset);
}

__device__ inline float value_at(int32_t format, const uint8_t* src, int i) {
    switch (static_cast<Format>(format)) {
        case Format::none:
            return 0.0f;
#define X(name, type)  \
    case Format::name: \
        return value_of<type>(src, i);
            LKV_STORED_FORMATS(X)
#undef X
    }
    return 0.0f;
}

}  // namespace lkv::cuda
