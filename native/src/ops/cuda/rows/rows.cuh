// Rows on the device: new rows quantized and stored, rows of one region requantized into another.
#pragma once

#include <cuda_fp16.h>

#include "cache/formats.h"
#include "ops/cuda/problem.h"

namespace lkv::cuda {

constexpr int row_threads = 1024;

// The device's write_segment: all lanes of a warp enter with the same arguments. Segments in blocks are store_blocks', and those scaled
// by their group write_scaled_row's.
__device__ inline void write_segment_shared(int32_t format, const float* x, int width, uint8_t* dst) {
    switch (static_cast<Format>(format)) {
        case Format::none:
            return;
#define X(name, type)               \
    case Format::name:              \
        type::write(x, width, dst); \
        return;
            LKV_SEGMENT_FORMATS(X)
#undef X
        default:
            return;
    }
}

// f(a value of the segment's type), of the formats that are scaled by their group.
template <class F>
__device__ inline void with_scaled(int32_t format, F&& f) {
    switch (static_cast<Format>(format)) {
#define X(name, type)  \
    case Format::name: \
        f(type{});     \
        return;
        LKV_NORMAL_FORMATS(X)
#undef X
        default:
            return;
    }
}

// The segments of one group whose scale is its byte At: this is chosen, stored, and their codes with it. By a warp. segments: from the
// group's first on
template <int At>
__device__ inline void write_scaled(const SegmentLayout* segments, int n_segments, const float* x, uint8_t* row) {
    const int scales = segments[0].scales;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const auto has_scale = [&](const SegmentLayout& segment) {
        bool has = false;
        with_scaled(segment.format, [&](auto of) { has = decltype(of)::scale_at == At; });
        return has && segment.scales == scales;
    };
    SegmentLayout own = lane < n_segments ? segments[lane] : SegmentLayout{};
    int first = 0;  // of the segments that lanes have
    // f(a value of the type, segment)
    const auto each = [&](const auto& f) {
        for (int begin = 0; begin < n_segments; begin += 32) {
            if (begin != first) own = begin + lane < n_segments ? segments[begin + lane] : SegmentLayout{};
            first = begin;
            uint32_t left = __ballot_sync(0xffffffffu, has_scale(own));
            for (; left != 0; left &= left - 1) {
                const int at = __ffs(static_cast<int>(left)) - 1;
                const auto of_lane = [&](int32_t value) { return __shfl_sync(0xffffffffu, value, at); };
                SegmentLayout segment{};
                segment.format = of_lane(own.format);
                segment.width = of_lane(own.width);
                segment.column = of_lane(own.column);
                segment.offset = of_lane(own.offset);
                with_scaled(segment.format, [&](auto of) {
                    if constexpr (decltype(of)::scale_at == At) f(of, segment);
                });
            }
        }
    };
    const uint8_t scale = group_scale<At>(
        [&](const auto& f) { each([&](auto of, const SegmentLayout& s) { f(of, x + s.column, s.width); }); });
    each([&](auto of, const SegmentLayout& s) { of.write(x + s.column, s.width, inverse_of(scale), row + s.offset); });
    if (threadIdx.x % 32 == 0) row[scales + At] = scale;
}

// A row whose groups have scales. By all threads of the block, row_threads: a warp writes what has one scale.
__device__ inline void write_scaled_row(const SegmentLayout* segments, int n_segments, const float* x, uint8_t* row) {
    static_assert(group_scale_bytes == 4);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    int turn = 0;
    for (int first = 0; first < n_segments; first += 32) {
        const int s = first + lane;
        const bool begins = s < n_segments && (s == 0 || segments[s].scales != segments[s - 1].scales);
        for (uint32_t left = __ballot_sync(0xffffffffu, begins); left != 0;
             left &= left - 1, turn += group_scale_bytes) {
            const int group = first + __ffs(static_cast<int>(left)) - 1;
            const int at = (warp - turn) & (row_threads / 32 - 1);
            if (at == 0) write_scaled<0>(segments + group, n_segments - group, x, row);
            if (at == 1) write_scaled<1>(segments + group, n_segments - group, x, row);
            if (at == 2) write_scaled<2>(segments + group, n_segments - group, x, row);
            if (at == 3) write_scaled<3>(segments + group, n_segments - group, x, row);
        }
    }
}

__device__ inline bool has_group_scales(const SegmentLayout* segments, int n_segments) {
    return n_segments > 0 && format_scaled_by_group(static_cast<Format>(segments[0].format));
}

// Channel i of a segment. src, scales: its first byte, and that of its scales
template <class F>
__device__ inline float value_of(const uint8_t* src, const uint8_t* scales, int i) {
    const float code = F::code(src, i);
    if constexpr (!F::quantized) return code;
    constexpr int block = F::block > 0 ? F::block : 1 << 30;
    const Affine a = F::affine(scales, i / block);
    return fmaf(code, a.scale, a.offset);
}

// The same of any format, of a segment of a row.
__device__ inline float value_at(const SegmentLayout& segment, const uint8_t* row, int i) {
    switch (static_cast<Format>(segment.format)) {
        case Format::none:
            return 0.0f;
#define X(name, type)  \
    case Format::name: \
        return value_of<type>(row + segment.offset, row + segment.scales, i);
            LKV_ROW_FORMATS(X)
#undef X
        default:
            return 0.0f;
    }
    return 0.0f;
}

__device__ inline float as_float(float x) { return x; }
__device__ inline float as_float(__half x) { return __half2float(x); }
__device__ inline void put_value(float* to, float x) { *to = x; }
__device__ inline void put_value(__half* to, float x) { *to = __float2half_rn(x); }

// A row's stored channels to x, which has all. By all threads of the block.
template <class T>
__device__ inline void read_row(const SegmentLayout* segments, int n_segments, const uint8_t* row, T* x) {
    for (int s = 0; s < n_segments; s++) {
        const SegmentLayout segment = segments[s];
        for (int i = static_cast<int>(threadIdx.x); i < segment.width; i += static_cast<int>(blockDim.x)) {
            put_value(x + segment.column + i, value_at(segment, row, i));
        }
    }
}

}  // namespace lkv::cuda
