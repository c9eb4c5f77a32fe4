// From device memory into shared memory: stored bytes as they are, and queries as f16.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/rows/dequant.cuh"
#include "ops/cuda/rows/staged.h"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// The group's bytes of n rows from slot `first`, by `threads` threads. dst: [n, pitch]
// Rolled by default: instructions of a step's kernels come from device memory, where the weights have displaced them. Unrolled
// a rebuilt K of 64 channels takes 74 instead of 76 us a layer at 65536.
template <int threads, int unroll = 1>
__device__ inline void copy_rows(int thread, uint8_t* dst, int pitch, const uint8_t* rows, uint32_t row_bytes,
                                 const GroupTable& group, int first, int n) {
    // the threads stand in rows of a power of two, so that a copy costs an addition or two
    constexpr int most_bits = threads == 32 ? 5 : (threads == 128 ? 7 : (threads == 256 ? 8 : 9));
    static_assert(threads == 1 << most_bits);
    const int access_bits = group.access_bits;
    const int across_bits = min(static_cast<int>(group.across_bits), most_bits);
    const int across = 1 << across_bits;
    const int down = threads >> across_bits;
    const int row0 = thread >> across_bits;
    const uint8_t* const src = rows + static_cast<int64_t>(first + row0) * row_bytes + group.first;
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

// As copy_rows, of TILE slots by many threads, with rows tile_pitch apart. first: a multiple of 16.
template <int TILE, int threads>
__device__ inline void copy_tile(int thread, uint8_t* dst, int pitch, const uint8_t* rows, uint32_t row_bytes,
                                 const GroupTable& group, int first, int n) {
    const uint8_t* const src = rows + static_cast<int64_t>(first) * row_bytes + group.first;
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

// The item's descriptors, [n_regions][K, V], by all `threads` of the thread block.
template <int threads>
__device__ inline void load_chunks(const Problem& p, const WorkItem& item, Chunk* to) {
    const int per_region = 4 * (p.k_blocks + p.v_blocks);
    for (int i = threadIdx.x; i < p.n_regions * per_region; i += threads) {
        const int r = i / per_region;
        const int j = i - r * per_region;
        const RegionArgs& region = p.regions[r];
        to[i] = j < 4 * p.k_blocks ? region.chunks[region.k_groups[item.k_group].chunks + j]
                                   : region.chunks[region.v_groups[item.v_group].chunks + j - 4 * p.k_blocks];
    }
}

// One chunk of the descriptors of a decode kernel, and one group where there is one of that number, on their way from device memory: K with
// 4·KB chunks, V with 4·VB, GroupTables [n_regions][K, V].
template <int KB, int VB>
class TableEntry {
public:
    static constexpr int per_region = 4 * (KB + VB);

    __device__ TableEntry(const Problem& p, const WorkItem& item, int i) : i_(i), n_groups_(2 * p.n_regions) {
        if (i < p.n_regions * per_region) {
            const int r = i / per_region;
            const int j = i - r * per_region;
            const bool is_k = j < 4 * KB;
            const int at = is_k ? j : j - 4 * KB;
            const int n_chunks = 4 * (is_k ? p.k_blocks : p.v_blocks);
            const int first =
                is_k ? item.k_group * n_chunks : p.n_kv / p.k_group * 4 * p.k_blocks + item.v_group * n_chunks;
            if (at < n_chunks) chunk_ = p.regions[r].chunks[first + at];
        }
        if (i < n_groups_) {
            const bool is_k = i % 2 == 0;
            const RegionArgs& region = p.regions[i / 2];
            group_ = is_k ? region.k_groups[item.k_group] : region.v_groups[item.v_group];
            // blocks of the kernel that the group does not have are no chunks of its kind
            if ((is_k ? p.k_blocks : p.v_blocks) != (is_k ? KB : VB)) group_.kind = any_kind;
        }
    }
    __device__ void store(GroupTable* groups, Chunk* chunks) const {
        if (2 * i_ < n_groups_ * per_region) chunks[i_] = chunk_;
        if (i_ < n_groups_) groups[i_] = group_;
    }

private:
    int i_;
    int n_groups_;
    Chunk chunk_{};
    GroupTable group_{};
};

// All of them, by the first `threads` threads.
template <int KB, int VB>
__device__ inline void load_tables(const Problem& p, const WorkItem& item, int threads, GroupTable* groups,
                                   Chunk* chunks) {
#pragma unroll 1
    for (int i = threadIdx.x; i < p.n_regions * TableEntry<KB, VB>::per_region; i += threads) {
        TableEntry<KB, VB>(p, item, i).store(groups, chunks);
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

}  // namespace lkv::cuda
