// Rows on the device: new rows quantized and stored, rows of one region requantized into another.
#pragma once

#include "cache/formats.h"
#include "ops/cuda/args.h"

namespace lkv::cuda {

constexpr int row_threads = 512;
constexpr int writers_per_segment = 16;  // lanes, as format.h says

template <class F>
__device__ inline void write_as(const float* x, int width, uint8_t* dst, [[maybe_unused]] const Step* fitted) {
    if constexpr (requires { F::write(x, width, dst, fitted); }) {
        F::write(x, width, dst, fitted);
    } else {
        F::write(x, width, dst);
    }
}

// The device's write_segment: all sixteen lanes of a group enter with the same arguments. fitted: the segment's StepFit, or null
__device__ inline void write_segment_shared(int32_t format, const float* x, int width, uint8_t* dst,
                                            const Step* fitted = nullptr) {
    switch (static_cast<Format>(format)) {
        case Format::none:
            return;
#define X(name, type)                          \
    case Format::name:                         \
        write_as<type>(x, width, dst, fitted); \
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

// fitted: the StepFit of a row's only segment, or null
__device__ inline void write_row_shared(const SegmentLayout* segments, int n_segments, const float* x, uint8_t* row,
                                        const Step* fitted = nullptr) {
    for (int s = threadIdx.x / writers_per_segment; s < n_segments; s += row_threads / writers_per_segment) {
        const SegmentLayout segment = segments[s];
        write_segment_shared(segment.format, x + segment.column, segment.width, row + segment.offset, fitted);
    }
}

}  // namespace lkv::cuda
