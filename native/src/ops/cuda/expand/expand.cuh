// Prefill on rebuilt keys: a chunk of the context becomes full rows of f16 once for all query rows, is attended to as any full cache is
// (prefill.cuh), and the next chunk takes its place. What a chunk leaves is merged into the sums of those before: nothing grows with
// the context.
#pragma once

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/prefill/prefill_tile.cuh"
#include "ops/cuda/rows/copy.cuh"
#include "ops/cuda/shared_plan.h"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

constexpr int expand_threads = 256;
// bytes from slot to slot of a tile in shared memory, an odd multiple of 16
LKV_HD inline int expand_pitch(const AttnArgs& p) { return round_up(plane_tiles(p.head_dim, p.n_rot), 4) * 32 + 16; }

// Where plane_dim has dimension d of a head.
__device__ inline int column_of(const AttnArgs& p, int d) {
    const int planes = p.n_rot / 2;
    if (d >= p.n_rot) return 16 * ((planes + 7) / 8) + d - p.n_rot;
    const int plane = p.rope_neox != 0 ? d % planes : d / 2;
    const int second = p.rope_neox != 0 ? d / planes : d % 2;
    return 16 * (plane / 8) + plane % 8 + 8 * second;
}

// K of p, or V where p has it in K's place, of 64 slots and one KV head. grid: tiles of a chunk x KV heads. rows: f16
// [expand][n_kv][head_dim]; seq, pos, n_slots: of these rows, where not null.
__global__ void __launch_bounds__(expand_threads)
    expand_kernel(const __grid_constant__ AttnArgs p, int first_tile, uint8_t* rows, uint64_t* seq, int32_t* pos,
                  int32_t* n_slots) {
    let_next_start();
    wait_for_previous();
    extern __shared__ __align__(16) uint8_t tile[];  // f16 [64][pitch bytes], dimensions in the order of plane_dim
    __shared__ Chunk chunks[max_group_width / chunk_width];
    const Parts parts(p);
    if (n_slots != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        *n_slots = max(0, min(p.expand, (parts.n_tiles - first_tile) * expand_tile));
    }
    const int at = first_tile + static_cast<int>(blockIdx.x);
    if (at >= parts.n_tiles) return;
    const int head = blockIdx.y;
    const int r = parts.region_of(at);
    const RegionArgs& region = p.regions[r];
    const int first = (at - parts.tiles_before(r)) * expand_tile;
    const GroupTable group = region.k_groups[head / p.k_group];
    const int n_chunks = 4 * p.k_blocks;
    for (int i = threadIdx.x; i < n_chunks; i += expand_threads) chunks[i] = region.chunks[group.chunks + i];
    TileSource from{};
    from.n = min(expand_tile, p.n_slots[r] - first);
    from.k = region.k_rows + static_cast<int64_t>(first) * region.k_row_bytes + group.first;
    from.k_step = static_cast<int>(region.k_row_bytes);
    from.pos = region.pos + first;
    const int slot0 = static_cast<int>(blockIdx.x) * expand_tile;
    if (seq != nullptr && head == 0 && threadIdx.x < expand_tile) {
        const int slot = threadIdx.x;
        seq[slot0 + slot] = slot < from.n ? region.seq[first + slot] : 0;
        pos[slot0 + slot] = slot < from.n ? from.pos[slot] : 0;
    }
    __syncthreads();
    const int warp = threadIdx.x / 32;
    const int pitch = expand_pitch(p);
    if (p.k_b_planes != nullptr) {
        rebuild_side<expand_tile, expand_threads / 32>(p, head, warp, from, chunks, tile, pitch,
                                                       plane_tiles(p.head_dim, p.n_rot));
    } else {
        // full rows: as they are
        for (int i = threadIdx.x; i < expand_tile * n_chunks; i += expand_threads) {
            const int slot = i / n_chunks;
            const int j = i - slot * n_chunks;
            uint32_t x[8];
            pairs_of_chunk(from.k + static_cast<int64_t>(min(slot, from.n - 1)) * from.k_step, chunks[j], x);
            auto* const to = reinterpret_cast<uint16_t*>(tile + slot * pitch) + 16 * j;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                if (16 * j + pair_channel(k) + 2 >= 16 * plane_tiles(p.head_dim, 0)) continue;
                to[pair_channel(k)] = static_cast<uint16_t>(x[k]);
                to[pair_channel(k) + 2] = static_cast<uint16_t>(x[k] >> 16);
            }
        }
    }
    __syncthreads();
    const int eighths = p.head_dim / 8;
    for (int i = threadIdx.x; i < from.n * eighths; i += expand_threads) {
        const int slot = i / eighths;
        const int d = (i - slot * eighths) * 8;
        const auto* const of = reinterpret_cast<const uint16_t*>(tile + slot * pitch);
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            words[k] = of[column_of(p, d + 2 * k)] | static_cast<uint32_t>(of[column_of(p, d + 2 * k + 1)]) << 16;
        }
        *reinterpret_cast<uint4*>(rows + ((static_cast<int64_t>(slot0 + slot) * p.n_kv + head) * p.head_dim + d) * 2) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// The parts of a chunk and the chunks before it, whose sums are in p.out and their maxima and sums of weights in ml. By one warp a
// query row. p: of the attention on the chunk's rows; first, last: of the chunks
__global__ void __launch_bounds__(expand_threads)
    add_chunk_kernel(const __grid_constant__ AttnArgs p, float2* ml, bool first, bool last) {
    let_next_start();
    wait_for_previous();
    const Parts parts(p);
    const int lane = threadIdx.x % 32;
    const int64_t rows = static_cast<int64_t>(p.n_tokens) * p.n_head;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (expand_threads / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const auto* const of = reinterpret_cast<const float2*>(p.partial_ml) + row;
    const float2 before = first ? make_float2(-INFINITY, 0.0f) : ml[row];
    float top = before.x;
    for (int s = 0; s < parts.count; s++) top = fmaxf(top, of[s * rows].x);
    const auto share = [&](const float2& x) { return x.y > 0.0f ? exp2f(x.x - top) : 0.0f; };
    const bool mine = 4 * lane < p.head_dim;
    auto* const out = reinterpret_cast<float4*>(p.out + row * p.head_dim) + lane;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float total = before.y * share(before);
    if (!first && mine && before.y > 0.0f) add_share(sum, share(before), *out);
    for (int s = 0; s < parts.count; s++) {
        const float2 part = of[s * rows];
        if (part.y <= 0.0f) continue;
        total += part.y * share(part);
        if (mine) {
            add_share(sum, share(part),
                      reinterpret_cast<const float4*>(p.partial + (s * rows + row) * 64 * p.v_blocks)[lane]);
        }
    }
    if (last) {
        const float by = total > 0.0f ? 1.0f / total : 0.0f;
        sum = make_float4(sum.x * by, sum.y * by, sum.z * by, sum.w * by);
    } else if (lane == 0) {
        ml[row] = make_float2(top, total);
    }
    if (mine) *out = sum;
}

}  // namespace lkv::cuda
