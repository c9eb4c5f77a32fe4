// From device memory into shared memory: stored bytes as they are, and queries as f16.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/args.h"
#include "ops/cuda/dequant.cuh"
#include "ops/cuda/mma.cuh"

namespace lkv::cuda {

// The group's bytes of n rows from slot `first`, by `threads` threads. dst: [n, pitch]
template <int threads>
__device__ inline void copy_rows(int thread, uint8_t* dst, int pitch, const uint8_t* rows, uint32_t row_bytes,
                                 const GroupTable& group, int first, int n) {
    const uint8_t* src = rows + static_cast<int64_t>(first) * row_bytes + group.first;
    // the threads stand in rows of a power of two, so that a copy costs an addition or two
    const int access_bits = group.access == 16 ? 4 : 2;
    const int per_row = static_cast<int>(group.bytes) >> access_bits;
    constexpr int most_bits = threads == 32 ? 5 : 8;
    const int across_bits = min(32 - __clz(max(per_row, 1) - 1), most_bits);
    const int across = 1 << across_bits;
    const int down = threads >> across_bits;
    const int row0 = thread >> across_bits;
    const int column0 = thread & (across - 1);
    const int64_t from_step = static_cast<int64_t>(down) * row_bytes;
    // rolled: instructions of a step's kernels come from device memory, where the weights have displaced them
#pragma unroll 1
    for (int column = column0; column < per_row; column += across) {
        uint8_t* to = dst + row0 * pitch + (column << access_bits);
        const uint8_t* from = src + static_cast<int64_t>(row0) * row_bytes + (column << access_bits);
#pragma unroll 1
        for (int s = row0; s < n; s += down, to += down * pitch, from += from_step) {
            if (access_bits == 4) {
                copy_async<16>(to, from);
            } else {
                copy_async<4>(to, from);
            }
        }
    }
}

// Bytes from row to row where copy_tile put them. Rows that are copied whole and start on no 16 bytes lie as they were stored:
// their first slots do start on 16 bytes, and 4 bytes at a time would be four times the copies.
__device__ inline bool copied_whole(uint32_t row_bytes, const GroupTable& group) {
    return group.access == 4 && group.bytes == row_bytes;
}
__device__ inline int tile_pitch(int pitch, uint32_t row_bytes, const GroupTable& group) {
    return copied_whole(row_bytes, group) ? static_cast<int>(row_bytes) : pitch;
}

// As copy_rows, of TILE slots by many threads, with rows tile_pitch apart. first: a multiple of 16.
template <int TILE, int threads>
__device__ inline void copy_tile(int thread, uint8_t* dst, int pitch, const uint8_t* rows, uint32_t row_bytes,
                                 const GroupTable& group, int first, int n) {
    const uint8_t* const src = rows + static_cast<int64_t>(first) * row_bytes + group.first;
    if (copied_whole(row_bytes, group)) {
        const int bytes = n * static_cast<int>(row_bytes);
#pragma unroll 4
        for (int at = 16 * thread; at < bytes; at += 16 * threads)
            copy_async_part(dst + at, src + at, min(16, bytes - at));
        return;
    }
    constexpr int across = threads / TILE;
    const int row = thread / across;
    if (row >= n) return;
    uint8_t* const to = dst + row * pitch;
    const uint8_t* const from = src + static_cast<int64_t>(row) * row_bytes;
    const int bytes = static_cast<int>(group.bytes);
    if (group.access == 16) {
#pragma unroll 4
        for (int at = thread % across * 16; at < bytes; at += 16 * across) copy_async<16>(to + at, from + at);
    } else {
#pragma unroll 4
        for (int at = thread % across * 4; at < bytes; at += 4 * across) copy_async<4>(to + at, from + at);
    }
}

// Two channels of a query row as f16, zero where there are none.
__device__ inline uint32_t query_pair(const float* row, int width, int channel) {
    const float x = row != nullptr && channel < width ? row[channel] : 0.0f;
    const float y = row != nullptr && channel + 2 < width ? row[channel + 2] : 0.0f;
    return bits(__floats2half2_rn(x, y));
}

}  // namespace lkv::cuda
