// Rows on the device: new rows quantized and stored, rows of one region requantized into another.
#pragma once

#include <cuda_fp16.h>

#include "cache/formats.h"
#include "ops/cuda/problem.h"

namespace lkv::cuda {

constexpr int row_threads = 1024;

// The device's write_segment: all lanes of a warp enter with the same arguments. Segments in blocks are store_blocks', and those scaled
// by their row write_scaled_row's.
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

// f(a value of the segment's type), of the formats that are scaled by their row.
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

static_assert(row_threads == 32 * row_strands, "a warp is a strand");

// What the warps of a block have summed, in the host's order (cache/row.cpp). own: of all lanes of a warp
__device__ inline LevelSums sum_of_warps(const LevelSums& own) {
    __shared__ LevelSums of_warps[row_strands];
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane == 0) of_warps[threadIdx.x / 32] = own;
    __syncthreads();
    const LevelSums mine = of_warps[lane];
    __syncthreads();  // before the next sums come
    const auto add = [](float a, float b) { return a + b; };
    return {across<row_strands>(mine.xl, add), across<row_strands>(mine.ll, add)};
}

// A row that has scales. By all threads of the block, row_threads.
__device__ inline void write_scaled_row(const SegmentLayout* segments, int n_segments, const float* x, uint8_t* row) {
    __shared__ int reach;  // of n8 and n6: bits of a float that is not negative are in its order
    if (threadIdx.x == 0) reach = 0;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    bool has_middle = false;
    for (int s = 0; s < n_segments; s++) {
        with_scaled(segments[s].format, [&](auto f) { has_middle = has_middle || fits_scale(f.bits, true); });
    }
    int n = 0;
    for (int s = 0; s < n_segments; s++) {
        with_scaled(segments[s].format, [&](auto f) { n += fits_scale(f.bits, has_middle) ? segments[s].width : 0; });
    }
    __syncthreads();
    // of_segment(a value of its type, its x, its width)
    const auto sums_of = [&](const auto& of_segment) {
        LevelSums sums{};
        for (int s = warp; s < n_segments; s += row_strands) {
            const SegmentLayout segment = segments[s];
            with_scaled(segment.format, [&](auto f) {
                if (!fits_scale(f.bits, has_middle)) return;
                const LevelSums more = of_segment(f, x + segment.column, segment.width);
                sums = {sums.xl + more.xl, sums.ll + more.ll};
            });
        }
        return sum_of_warps(sums);
    };
    for (int s = warp; s < n_segments; s += row_strands) {
        const SegmentLayout segment = segments[s];
        with_scaled(segment.format, [&](auto f) {
            if constexpr (!decltype(f)::clips) {
                const float of_segment = f.reach(x + segment.column, segment.width);
                if (threadIdx.x % 32 == 0) atomicMax(&reach, static_cast<int>(float_bits(of_segment)));
            }
        });
    }
    const LevelSums power =
        sums_of([](auto, const float* of, int width) { return LevelSums{power_of(of, width), 0.0f}; });
    RowScaleFit fit(power.xl, n);
    for (int k = 0; k < RowScaleFit::n_refine; k++) {
        const float inverse = fit.inverse();
        fit.refine(sums_of([=](auto f, const float* of, int width) { return f.sums(of, width, inverse); }));
    }
    const RowScales scales{fit.stored(), half_ceil(float_from_bits(static_cast<uint32_t>(reach)))};
    if (threadIdx.x == 0) scales.store(row);
    for (int s = warp; s < n_segments; s += row_strands) {
        const SegmentLayout segment = segments[s];
        with_scaled(segment.format, [&](auto f) {
            f.write(x + segment.column, segment.width, scales.inverse(f.clips), row + segment.offset);
        });
    }
}

__device__ inline bool has_row_scale(const SegmentLayout* segments, int n_segments) {
    return n_segments > 0 && format_scaled_by_row(static_cast<Format>(segments[0].format));
}

// Channel i of the segment of that format that begins `offset` bytes into a row.
template <class F>
__device__ inline float value_of(const uint8_t* row, int offset, int i) {
    const float code = F::code(row + offset, i);
    if constexpr (!F::quantized) return code;
    constexpr int block = F::block > 0 ? F::block : 1 << 30;
    const Affine a = affine_of<F>(row, offset, i / block);
    return fmaf(code, a.scale, a.offset);
}

// The same of any format.
__device__ inline float value_at(int32_t format, const uint8_t* row, int offset, int i) {
    switch (static_cast<Format>(format)) {
        case Format::none:
            return 0.0f;
#define X(name, type)  \
    case Format::name: \
        return value_of<type>(row, offset, i);
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
            put_value(x + segment.column + i, value_at(segment.format, row, segment.offset, i));
        }
    }
}

}  // namespace lkv::cuda
