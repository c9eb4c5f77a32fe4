// Rows on the device: new rows quantized and stored, rows of one region requantized into another.
#pragma once

#include <cuda_fp16.h>

#include "cache/formats.h"
#include "ops/cuda/problem.h"
#include "ops/cuda/rows/value.cuh"

namespace lkv::cuda {

constexpr int row_threads = 1024;

// The device's write_segment: all lanes of a warp enter with the same arguments. Segments in blocks are store_blocks'.
__device__ inline void write_segment_shared(int32_t format, const float* x, int width, uint8_t* dst) {
    switch (static_cast<Format>(format)) {
        case Format::none:
            return;
#define X(name, type)               \
    case Format::name:              \
        type::write(x, width, dst); \
        return;
            LKV_ROW_FORMATS(X)
#undef X
        default:
            return;
    }
}

__device__ inline float value_at(int32_t format, const uint8_t* src, int i) {
    switch (static_cast<Format>(format)) {
        case Format::none:
            return 0.0f;
#define X(name, type)  \
    case Format::name: \
        return value_of<type>(src, i);
            LKV_ROW_FORMATS(X)
#undef X
        default:
            return 0.0f;
    }
    return 0.0f;
}

__device__ inline void put_value(float* to, float x) { *to = x; }
__device__ inline void put_value(__half* to, float x) { *to = __float2half_rn(x); }

// A row's stored channels to x, which has all. By all threads of the block.
template <class T>
__device__ inline void read_row(const SegmentLayout* segments, int n_segments, const uint8_t* row, T* x) {
    for (int s = 0; s < n_segments; s++) {
        const SegmentLayout segment = segments[s];
        for (int i = static_cast<int>(threadIdx.x); i < segment.width; i += static_cast<int>(blockDim.x)) {
            put_value(x + segment.column + i, value_at(segment.format, row + segment.offset, i));
        }
    }
}

}  // namespace lkv::cuda
