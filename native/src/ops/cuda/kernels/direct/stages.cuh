// The stages of the direct kernel. All is inlined. Arrays, which lie in registers once loops are unrolled, are no members of what has single
// values: the compiler would keep these in memory until then, and unroll less.
#pragma once

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/kernels/direct/layout.h"
#include "ops/cuda/rows/copy.cuh"
#include "ops/cuda/rows/token_blocks.cuh"
#include "ops/cuda/softmax/parts.cuh"
#include "ops/cuda/step/rope.cuh"

namespace lkv::cuda {

// Chunk of K's slot s in a tile.
template <bool BLOCKS>
__device__ inline void key_pairs(const uint8_t* rows, int s, int pitch, const Chunk& chunk, uint32_t (&out)[8]) {
    if constexpr (BLOCKS) {
        pairs_in_block(rows, s, pitch, chunk, out);
    } else {
        pairs_of_chunk(rows + s * pitch, chunk, out);
    }
}

// k tile of one KV head from its latent tile. raw: f32 [tile][head_dim + 4]; out: f16 rows of out_pitch bytes.
template <bool BLOCKS>
__device__ inline void rebuild_tile(const DirectArgs& p, int head, const Chunk* chunks, const uint8_t* rows,
                                    const int32_t* positions, float* raw, uint8_t* out, int out_pitch) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const int n_m = p.tile / 16;
    const int per_m = n_warps / n_m;  // warps that share 16 slots
    const int m = warp % n_m;
    const int n_tiles = p.head_dim / 8;
    const int pitch = p.head_dim + 4;
    constexpr int at_once = 8;
    for (int t0 = warp / n_m * at_once; t0 < n_tiles; t0 += per_m * at_once) {
        float acc[at_once][4] = {};
        for (int b = 0; b < p.k_blocks; b++) {
            uint32_t x[8];
            uint32_t y[8];
            key_pairs<BLOCKS>(rows, 16 * m + g, p.k_pitch, chunks[4 * b + c], x);
            key_pairs<BLOCKS>(rows, 16 * m + g + 8, p.k_pitch, chunks[4 * b + c], y);
            const uint2* const factor = reinterpret_cast<const uint2*>(p.fragments) +
                                        static_cast<int64_t>(head * p.k_blocks + b) * n_tiles * 4 * 32 + lane;
#pragma unroll
            for (int t = 0; t < at_once; t++) {
                if (t0 + t < n_tiles) {
#pragma unroll
                    for (int s = 0; s < 4; s++) {
                        const uint32_t a[4] = {x[s], y[s], x[s + 4], y[s + 4]};
                        const uint2 f = __ldg(factor + ((t0 + t) * 4 + s) * 32);
                        mma(acc[t], a, f.x, f.y);
                    }
                }
            }
        }
#pragma unroll
        for (int t = 0; t < at_once; t++) {
            if (t0 + t < n_tiles) {
                float* const to = raw + (16 * m + g) * pitch + 8 * (t0 + t) + 2 * c;
                *reinterpret_cast<float2*>(to) = make_float2(acc[t][0], acc[t][1]);
                *reinterpret_cast<float2*>(to + 8 * pitch) = make_float2(acc[t][2], acc[t][3]);
            }
        }
    }
    __syncthreads();

    for (int s = warp; s < p.tile; s += n_warps) {
        auto* const key = reinterpret_cast<__half*>(out + s * out_pitch);
        finish_key<most_head_dim>(p, head, positions[s], raw + s * pitch, key, lane);
    }
    __syncthreads();
}

// What a thread knows of the row whose softmax it shares, and its share of that.
struct DirectRow : QueryRow {
    int at;  // of [n_tokens, n_head], below 0: none
};
struct DirectState {
    float top = -INFINITY;
    float sum = 0.0f;
};

// MB: 16-row blocks of queries. NB: 64-channel blocks of a group per warp. REBUILD: K path. BLOCKS: K of a region is in blocks of tokens.
template <int MB, int NB, bool REBUILD, bool BLOCKS>
struct DirectBlock {
    static constexpr int R = 16 * MB;
    static constexpr int row_threads = n_threads / R;

    const DirectArgs& p;
    const DirectLayout& plan;
    const WorkItem& item;
    const Parts& parts;
    uint8_t* const shared;
    const int first_row;
    const int split;
    const int tile_begin = parts.begin(split);
    const int tile_end = parts.begin(split + 1);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const int tile = p.tile;
    Chunk* const chunks = reinterpret_cast<Chunk*>(shared);
    uint8_t* const stages = shared + plan.chunks;
    float* const planes = reinterpret_cast<float*>(stages + p.stages * plan.stage);
    __half* const weights = reinterpret_cast<__half*>(reinterpret_cast<uint8_t*>(planes) + plan.planes);
    float* const row_scale = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(weights) + plan.weights);
    uint8_t* const rebuilt = reinterpret_cast<uint8_t*>(row_scale) + plan.scales;
    float* const raw = reinterpret_cast<float*>(rebuilt + plan.rebuilt);
    const int chunks_per_region = 4 * (p.k_blocks + p.v_blocks);
    int issue_stage = 0;
    // warps side by side over channel blocks of K, and of V
    const int q_blocks = REBUILD ? (p.head_dim + 63) / 64 : p.k_blocks;
    const int k_side = channel_warps(q_blocks);
    const int k_channel = warp % k_side;
    const int k_slot = warp / k_side;
    const int k_slots = n_warps / k_side;
    const int v_side = channel_warps(p.v_blocks);
    const int v_channel = warp % v_side;
    const int v_slot = warp / v_side;
    const int v_slots = n_warps / v_side;
    const int my_row = threadIdx.x / row_threads;
    const int my_part = threadIdx.x % row_threads;
    const int rebuilt_pitch = q_blocks * 128 + 16;
    const int plane_pitch = tile + 8;

    using Queries = uint32_t[MB][NB][4][4];
    using Sums = float[MB][NB][8][4];

    __device__ __forceinline__ void issue(int t) {
        if (t < tile_end) {
            const int r = parts.region_of(t);
            const RegionArgs& region = p.regions[r];
            const int first = (t - parts.tiles_before(r)) * tile;
            const int n = min(tile, p.n_slots[r] - first);
            uint8_t* const at = stages + issue_stage * plan.stage;
            issue_stage = issue_stage + 1 == p.stages ? 0 : issue_stage + 1;
            auto* const seq = reinterpret_cast<uint64_t*>(at + tile * (p.k_pitch + p.v_pitch));
            auto* const pos = reinterpret_cast<int32_t*>(seq + tile);
            if (static_cast<int>(threadIdx.x) < tile) {
                copy_mark(seq, pos, region.seq + first, region.pos + first, static_cast<int>(threadIdx.x), n);
            }
            // a block's numbers lie in all of its rows
            const int n_k = BLOCKS ? min(tile, round_up(n, region.k_block)) : n;
            copy_rows<n_threads>(threadIdx.x, at, p.k_pitch, region.k_row(first), region.k_row_bytes,
                                 region.k_groups[item.k_group], n_k);
            copy_rows<n_threads>(threadIdx.x, at + tile * p.k_pitch, p.v_pitch, region.v_row(first), region.v_row_bytes,
                                 region.v_groups[item.v_group], n);
        }
        copies_commit();
    }

    // The queries of this warp's channel blocks.
    __device__ __forceinline__ void read_queries(Queries& q) const {
#pragma unroll
        for (int m = 0; m < MB; m++) {
            const float* rows[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = first_row + 16 * m + g + 8 * i;
                rows[i] = row < item.n_rows ? p.q + static_cast<int64_t>(item.row_at(p, row)) * p.q_width : nullptr;
            }
#pragma unroll
            for (int n = 0; n < NB; n++) {
                const int b = k_channel + k_side * n;
#pragma unroll
                for (int s = 0; s < 4; s++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int channel = 64 * b + 16 * c + pair_channel(s + i / 2 * 4);
                        q[m][n][s][i] = query_pair(b < q_blocks ? rows[i % 2] : nullptr, p.q_width, channel);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ DirectRow read_row() const {
        const int row = first_row + my_row;
        const int at = row < item.n_rows ? item.row_at(p, row) : -1;
        return {load_query_row(p, at), at};
    }

    __device__ __forceinline__ void clear() const {
        for (int i = threadIdx.x; i < plan.weights / 4; i += n_threads) reinterpret_cast<uint32_t*>(weights)[i] = 0;
        for (int i = threadIdx.x; i < R; i += n_threads) row_scale[i] = 1.0f;
        if constexpr (REBUILD) {
            for (int i = threadIdx.x; i < plan.rebuilt / 16; i += n_threads) {
                reinterpret_cast<uint4*>(rebuilt)[i] = make_uint4(0, 0, 0, 0);
            }
        }
    }

    // Free slots of V: zeros.
    __device__ __forceinline__ void clear_holes(const uint64_t* seq, uint8_t* v_rows) const {
        const bool hole = static_cast<int>(threadIdx.x) < tile && seq[threadIdx.x] == 0;
        if (__syncthreads_or(hole)) {
            // free slots hold anything, NaN too: zero bytes decode to finite values in every format. K stays: no one reads their scores
            for (int s = warp; s < tile; s += n_warps) {
                if (seq[s] != 0) continue;
                for (int i = lane; i < p.v_pitch / 16; i += 32) {
                    reinterpret_cast<uint4*>(v_rows + s * p.v_pitch)[i] = make_uint4(0, 0, 0, 0);
                }
            }
            __syncthreads();
        }
    }

    __device__ __forceinline__ void score(const Chunk* k_chunks, const uint8_t* k_rows, const Queries& q) const {
        for (int n8 = k_slot; n8 < tile / 8; n8 += k_slots) {
            float sum[MB][4] = {};
#pragma unroll
            for (int n = 0; n < NB; n++) {
                const int b = k_channel + k_side * n;
                if (b < q_blocks) {
                    uint32_t k[8];
                    if constexpr (REBUILD) {
                        const WideF16Reader reader(nullptr, k_chunks[0]);
                        reader.all(rebuilt + (8 * n8 + g) * rebuilt_pitch + 128 * b + 32 * c, k);
                    } else {
                        key_pairs<BLOCKS>(k_rows, 8 * n8 + g, p.k_pitch, k_chunks[4 * b + c], k);
                    }
#pragma unroll
                    for (int s = 0; s < 4; s++) {
#pragma unroll
                        for (int m = 0; m < MB; m++) {
                            mma(sum[m], q[m][n][s], k[s], k[s + 4]);
                        }
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < MB; m++) {
                float* const to = planes + (k_channel * R + 16 * m + g) * plane_pitch + 8 * n8 + 2 * c;
                *reinterpret_cast<float2*>(to) = make_float2(sum[m][0], sum[m][1]);
                *reinterpret_cast<float2*>(to + 8 * plane_pitch) = make_float2(sum[m][2], sum[m][3]);
            }
        }
    }

    // By the threads of a row.
    __device__ __forceinline__ void make_weights(const uint64_t* seq, const int32_t* pos, const DirectRow& row,
                                                 DirectState& state) const {
        const float scale = p.scale * log2_e;
        const float cap = p.softcap * log2_e;
        constexpr int max_columns = max_tile(R) / row_threads;
        float x[max_columns];
        float tile_max = -INFINITY;
#pragma unroll
        for (int i = 0; i < max_columns; i++) {
            const int s = my_part + row_threads * i;
            x[i] = -INFINITY;
            if (s < tile) {
                float score = 0.0f;
                for (int w = 0; w < k_side; w++) score += planes[(w * R + my_row) * plane_pitch + s];
                const int distance = row.pos - pos[s];
                if ((seq[s] & row.seq) != 0 && distance >= 0 && (p.window == 0 || distance < p.window)) {
                    score *= scale;
                    if (cap > 0.0f) score = cap * tanhf(score / cap);
                    x[i] = score - row.slope * static_cast<float>(distance);
                }
                tile_max = fmaxf(tile_max, x[i]);
            }
        }
#pragma unroll
        for (int o = row_threads / 2; o > 0; o /= 2) {
            tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, o));
        }
        const float new_max = fmaxf(state.top, tile_max);
        const float base = new_max == -INFINITY ? 0.0f : new_max;
        const float rescale = exp2f(state.top - base);
        state.sum *= rescale;
        state.top = new_max;
        if (my_part == 0) row_scale[my_row] = rescale;
#pragma unroll
        for (int i = 0; i < max_columns; i++) {
            const int s = my_part + row_threads * i;
            if (s < tile) {
                const __half w = __float2half_rn(exp2f(x[i] - base));
                weights[my_row * plane_pitch + s] = w;
                state.sum += __half2float(w);  // the weights as the product sees them
            }
        }
    }

    __device__ __forceinline__ void add_values(const Chunk* v_chunks, const uint8_t* v_rows, Sums& acc) const {
#pragma unroll
        for (int m = 0; m < MB; m++) {
            const float upper = row_scale[16 * m + g];
            const float lower = row_scale[16 * m + g + 8];
            // a maximum rarely moves once a few tiles have passed
            if (!__any_sync(0xffffffffu, upper != 1.0f || lower != 1.0f)) continue;
#pragma unroll
            for (int n = 0; n < NB; n++) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    acc[m][n][i][0] *= upper;
                    acc[m][n][i][1] *= upper;
                    acc[m][n][i][2] *= lower;
                    acc[m][n][i][3] *= lower;
                }
            }
        }
        for (int k16 = v_slot; k16 < tile / 16; k16 += v_slots) {
            uint32_t w[MB][4];
#pragma unroll
            for (int m = 0; m < MB; m++) {
                load_a(w[m], weights + 16 * m * plane_pitch + 16 * k16, plane_pitch * 2, lane);
            }
            const uint8_t* const slot = v_rows + (16 * k16 + 2 * c) * p.v_pitch;
#pragma unroll
            for (int n = 0; n < NB; n++) {
                const int b = v_channel + v_side * n;
                if (b < p.v_blocks) {
                    const Chunk chunk = v_chunks[4 * b + g / 2];
                    uint32_t first[8];
                    uint32_t second[8];
                    slot_pairs(slot, slot + p.v_pitch, chunk, g % 2, first);
                    slot_pairs(slot + 8 * p.v_pitch, slot + 9 * p.v_pitch, chunk, g % 2, second);
#pragma unroll
                    for (int i = 0; i < 8; i++) {
#pragma unroll
                        for (int m = 0; m < MB; m++) mma(acc[m][n][i], w[m], first[i], second[i]);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void walk(const Queries& q, const DirectRow& row, DirectState& state, Sums& acc) {
        int stage = 0;
        for (int t = tile_begin; t < tile_end; t++) {
            const int region = parts.region_of(t);
            if (p.stages == 1) {
                __syncthreads();
                issue(t);
            }
            copies_wait(p.stages == 1 ? 0 : p.stages - 2);
            uint8_t* const k_rows = stages + stage * plan.stage;
            stage = stage + 1 == p.stages ? 0 : stage + 1;
            uint8_t* const v_rows = k_rows + tile * p.k_pitch;
            auto* const seq = reinterpret_cast<uint64_t*>(v_rows + tile * p.v_pitch);
            auto* const pos = reinterpret_cast<int32_t*>(seq + tile);
            clear_holes(seq, v_rows);
            if (p.stages > 1) issue(t + p.stages - 1);
            const Chunk* const k_chunks = chunks + region * chunks_per_region;
            const Chunk* const v_chunks = k_chunks + 4 * p.k_blocks;
            if constexpr (REBUILD) {
                rebuild_tile<BLOCKS>(p, item.head_kv, k_chunks, k_rows, pos, raw, rebuilt, rebuilt_pitch);
            }
            score(k_chunks, k_rows, q);
            __syncthreads();
            // a warp whose rows do not exist leaves their weights at zero
            if (warp * 32 / row_threads + first_row < item.n_rows) make_weights(seq, pos, row, state);
            __syncthreads();
            add_values(v_chunks, v_rows, acc);
        }
    }

    // Sums of all warps, then results or a part.
    __device__ __forceinline__ void leave(const DirectRow& row, DirectState& state, const Sums& acc) const {
        // every thread of a row holds its own part of the sum
#pragma unroll
        for (int o = row_threads / 2; o > 0; o /= 2) state.sum += __shfl_xor_sync(0xffffffffu, state.sum, o);

        // warps that took other slots of the same channels add theirs
        __syncthreads();
        auto* const merged = reinterpret_cast<float*>(stages);  // [R][64·v_blocks]
        const int merged_pitch = 64 * p.v_blocks;
        for (int turn = 0; turn < v_slots; turn++) {
            if (v_slot == turn) {
#pragma unroll
                for (int n = 0; n < NB; n++) {
                    const int b = v_channel + v_side * n;
                    if (b < p.v_blocks) {
#pragma unroll
                        for (int m = 0; m < MB; m++) {
#pragma unroll
                            for (int i = 0; i < 8; i++) {
#pragma unroll
                                for (int e = 0; e < 4; e++) {
                                    // column 2c + e%2 of tile i is that thread's channel: chunk c, half e%2, pair i/2
                                    const int channel =
                                        64 * b + 16 * c + 4 * (e % 2) + i / 2 % 2 + i / 4 * 8 + 2 * (i % 2);
                                    float* const to = merged + (16 * m + g + e / 2 * 8) * merged_pitch + channel;
                                    *to = turn == 0 ? acc[m][n][i][e] : *to + acc[m][n][i][e];
                                }
                            }
                        }
                    }
                }
            }
            __syncthreads();
        }
        if (row.at < 0) return;
        const int64_t out_row = row.at;
        const float* const from = merged + my_row * merged_pitch;
        const bool whole = parts.count == 1 && p.v_b == nullptr && p.leaves != Leaves::parts;
        const int64_t at = static_cast<int64_t>(split) * p.n_tokens * p.n_head + out_row;
        if (my_part == 0 && !whole) {
            p.partial_ml[2 * at] = state.top;
            p.partial_ml[2 * at + 1] = state.sum;
        }
        if (whole) {
            const float inverse = state.sum > 0.0f ? 1.0f / state.sum : 0.0f;
            for (int d = my_part; d < p.head_dim; d += row_threads) p.out[out_row * p.head_dim + d] = from[d] * inverse;
        } else {
            for (int d = my_part; d < merged_pitch; d += row_threads) p.partial[at * merged_pitch + d] = from[d];
        }
    }
};

}  // namespace lkv::cuda
