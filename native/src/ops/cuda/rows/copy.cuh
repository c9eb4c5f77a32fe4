// From device memory into shared memory: stored bytes as they are, and queries as f16.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/problem.h"
#include "ops/cuda/rows/dequant.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// The group's bytes of n rows of a page, by `threads` threads. rows: of the first one. dst: [n, pitch]
// Rolled by default: instructions of a step's kernels come from device memory, where the weights have displaced them. Unrolled
// a rebuilt K of 64 channels takes 74 instead of 76 us a layer at 65536.
template <int threads, int unroll = 1>
__device__ inline void copy_rows(int thread, uint8_t* dst, int pitch, const uint8_t* rows, uint32_t row_bytes,
                                 const GroupTable& group, int n) {
    // the threads stand in rows of a power of two, so that a copy costs an addition or two
    constexpr int most_bits = threads == 32 ? 5 : (threads == 128 ? 7 : (threads == 256 ? 8 : 9));
    static_assert(threads == 1 << most_bits);
    const int access_bits = group.access_bits;
    const int across_bits = min(static_cast<int>(group.across_bits), most_bits);
    const int across = 1 << across_bits;
    const int down = threads >> across_bits;
    const int row0 = thread >> across_bits;
    const uint8_t* const src = rows + static_cast<int64_t>(row0) * row_bytes + group.first;
    const int64_t from_step = static_cast<int64_t>(down) * row_bytes;
#pragma unroll 1
    for (int at = (thread & (across - 1)) << access_bits; at < static_cast<int>(group.bytes);
         at += across << access_bits) {
        uint8_t* to = dst + row0 * pitch + at;
        const uint8_t* from = src + at;
        if (unroll > 1 && access_bits == 4) {
#pragma unroll(unroll)
            for (int s = row0; s < n; s += down, to += down * pitch, from += from_step) copy_async<16>(to, from);
            continue;
        }
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

// n bytes, a multiple of 4, that lie in shared memory as in device memory. Both from multiples of 16.
template <int threads>
__device__ inline void copy_whole_rows(int thread, uint8_t* dst, const uint8_t* src, int n) {
#pragma unroll 1
    for (int at = 16 * thread; at + 16 <= n; at += 16 * threads) copy_async<16>(dst + at, src + at);
    const int last = n / 16 * 16 + 4 * thread;
    if (last < n) copy_async<4>(dst + last, src + last);
}

// Bytes from row to row where copy_tile put them.
__device__ inline int tile_pitch(int pitch, uint32_t row_bytes, const GroupTable& group) {
    return copied_whole(row_bytes, group) ? static_cast<int>(row_bytes) : pitch;
}

// As copy_rows, of TILE slots by many threads, with rows tile_pitch apart.
template <int TILE, int threads>
__device__ inline void copy_tile(int thread, uint8_t* dst, int pitch, const uint8_t* rows, uint32_t row_bytes,
                                 const GroupTable& group, int n) {
    const uint8_t* const src = rows + group.first;
    if (copied_whole(row_bytes, group)) {
        copy_whole_rows<threads>(thread, dst, src, n * static_cast<int>(row_bytes));
        return;
    }
    constexpr int across = threads / TILE;
    const int row = thread / across;
    if (row >= n) return;
    uint8_t* const to = dst + row * pitch;
    const uint8_t* const from = src + static_cast<int64_t>(row) * row_bytes;
    const int bytes = static_cast<int>(group.bytes);
    if (group.access_bits == 4) {
#pragma unroll 4
        for (int at = thread % across * 16; at < bytes; at += 16 * across) copy_async<16>(to + at, from + at);
    } else {
#pragma unroll 4
        for (int at = thread % across * 4; at < bytes; at += 4 * across) copy_async<4>(to + at, from + at);
    }
}

// The descriptors of the item's K group, or V group, in one region: as region_tables lays them, so that no group is waited for.
__device__ inline const Chunk* chunks_of(const Problem& p, const WorkItem& item, int region, bool is_k) {
    const int of_k = 4 * p.k_blocks;
    return p.regions[region].chunks +
           (is_k ? item.k_group * of_k : p.n_kv / p.k_group * of_k + item.v_group * 4 * p.v_blocks);
}

// All of the item's, [n_regions][K, V], by all `threads` of the thread block.
template <int threads>
__device__ inline void load_chunks(const Problem& p, const WorkItem& item, Chunk* to) {
    const int of_k = 4 * p.k_blocks;
    const int per_region = of_k + 4 * p.v_blocks;
#pragma unroll 1
    for (int i = threadIdx.x; i < p.n_regions * per_region; i += threads) {
        const int r = i / per_region;
        const int j = i - r * per_region;
        to[i] = chunks_of(p, item, r, j < of_k)[j < of_k ? j : j - of_k];
    }
}

// Channels channel … channel + 3 of a query row, a multiple of 4; zero where there are none.
__device__ inline float4 four_floats(const float* row, int width, int channel) {
    if (row == nullptr || channel >= width) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (width % 4 == 0) return *reinterpret_cast<const float4*>(row + channel);
    return make_float4(row[channel], channel + 1 < width ? row[channel + 1] : 0.0f,
                       channel + 2 < width ? row[channel + 2] : 0.0f, channel + 3 < width ? row[channel + 3] : 0.0f);
}

// Two channels of a query row as f16, zero where there are none.
__device__ inline uint32_t query_pair(const float* row, int width, int channel) {
    const float x = row != nullptr && channel < width ? row[channel] : 0.0f;
    const float y = row != nullptr && channel + 2 < width ? row[channel + 2] : 0.0f;
    return bits(__floats2half2_rn(x, y));
}

// Sequence and position of slot s of a tile of `n` slots of a region, by one thread; slots after them are free.
__device__ inline void copy_mark(uint64_t* seq, int32_t* pos, const uint64_t* from_seq, const int32_t* from_pos, int s,
                                 int n) {
    if (s < n) {
        copy_async<8>(seq + s, from_seq + s);
        copy_async<4>(pos + s, from_pos + s);
    } else {
        seq[s] = 0;
        pos[s] = 0;
    }
}

}  // namespace lkv::cuda
