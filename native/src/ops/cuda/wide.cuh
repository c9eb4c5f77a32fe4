// Attention of up to 32 query rows on a stored K of any width: many query heads that share one latent, or a few tokens.
// As in decode.cuh slots are the rows of both products; here the warps of a thread block share a tile:
//
//   scores    every warp dequantizes 16 slots of K (or its part of their channels) once and multiplies them with all queries,
//             which lie in shared memory in the order of the products' operands
//   softmax   by query row over the tile: online maximum and sum, weights as f16
//   values    every warp dequantizes its 64-channel blocks of V for all slots of the tile; sums stay in registers
#pragma once

#include "ops/cuda/args.h"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/copy.cuh"
#include "ops/cuda/dequant.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/parts.cuh"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

// NT: 8-row blocks of queries. NB: 64-channel blocks of V per warp. Kind: as in with_chunk.
template <int NT, int NB, int Kind>
__global__ void __launch_bounds__(n_threads, 1) wide_kernel(const __grid_constant__ AttnArgs p) {
    constexpr int R = 8 * NT;
    extern __shared__ __align__(16) uint8_t shared[];
    let_next_start();
    const Parts parts(p);
    const int split = blockIdx.z;
    if (split >= parts.count) return;
    const int tile = parts.tile;
    const WidePlan plan(p, R, tile);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const int tile_begin = parts.begin(split);
    const int tile_end = parts.begin(split + 1);

    auto* const groups = reinterpret_cast<GroupTable*>(shared);  // [n_regions][K, V]
    auto* const chunks = reinterpret_cast<Chunk*>(shared + plan.groups);
    auto* const queries = reinterpret_cast<uint2*>(shared + plan.groups + plan.chunks);  // [k_blocks][4][NT][32]
    uint8_t* const stages = reinterpret_cast<uint8_t*>(queries) + plan.queries;
    auto* const planes = reinterpret_cast<float*>(stages + p.stages * plan.stage);
    auto* const weights = reinterpret_cast<__half*>(reinterpret_cast<uint8_t*>(planes) + plan.planes);
    auto* const row_scale = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(weights) + plan.weights);

    const int head_kv = blockIdx.x * p.unit;
    const int k_group = head_kv / p.k_group;
    const int v_group = head_kv / p.v_group;
    const int rep = p.n_head / p.n_kv;
    const int unit_heads = p.unit * rep;
    const int first_row = blockIdx.y * R;
    const int n_rows = p.n_tokens * unit_heads;

    __shared__ int32_t rows_at[R];  // of a query row: which of [n_tokens, n_head] it is
    if (static_cast<int>(threadIdx.x) < min(R, n_rows - first_row)) {
        const int row = first_row + threadIdx.x;
        const int token = row / unit_heads;
        rows_at[threadIdx.x] = token * p.n_head + head_kv * rep + row - token * unit_heads;
    }
    const int chunks_per_region = 4 * (p.k_blocks + p.v_blocks);
#pragma unroll 1
    for (int i = threadIdx.x; i < p.n_regions * chunks_per_region; i += n_threads) {
        const int r = i / chunks_per_region;
        const int j = i - r * chunks_per_region;
        const bool is_k = j < 4 * p.k_blocks;
        const int first = is_k ? k_group * 4 * p.k_blocks + j
                               : p.n_kv / p.k_group * 4 * p.k_blocks + v_group * 4 * p.v_blocks + j - 4 * p.k_blocks;
        chunks[i] = p.regions[r].chunks[first];
    }
    if (static_cast<int>(threadIdx.x) < 2 * p.n_regions) {
        const RegionArgs& region = p.regions[threadIdx.x / 2];
        groups[threadIdx.x] = threadIdx.x % 2 == 0 ? region.k_groups[k_group] : region.v_groups[v_group];
    }
    __syncthreads();
    wait_for_previous();

    int issue_stage = 0;
    const auto issue = [&](int t) {
        if (t < tile_end) {
            const int r = parts.region_of(t);
            const RegionArgs& region = p.regions[r];
            const int first = (t - parts.tiles_before(r)) * tile;
            const int n = min(tile, p.n_slots[r] - first);
            uint8_t* const at = stages + issue_stage * plan.stage;
            auto* const seq = reinterpret_cast<uint64_t*>(at + tile * (p.k_pitch + p.v_pitch));
            auto* const pos = reinterpret_cast<int32_t*>(seq + tile);
            if (static_cast<int>(threadIdx.x) < tile) {
                const int s = threadIdx.x;
                if (s < n) {
                    copy_async<8>(seq + s, region.seq + first + s);
                    copy_async<4>(pos + s, region.pos + first + s);
                } else {
                    seq[s] = 0;
                    pos[s] = 0;
                }
            }
            copy_rows<n_threads>(threadIdx.x, at, p.k_pitch, region.k_rows, region.k_row_bytes, groups[2 * r], first,
                                 n);
            copy_rows<n_threads>(threadIdx.x, at + tile * p.k_pitch, p.v_pitch, region.v_rows, region.v_row_bytes,
                                 groups[2 * r + 1], first, n);
        }
        issue_stage = issue_stage + 1 == p.stages ? 0 : issue_stage + 1;
        copies_commit();
    };
    // queries [row][channel] f32 -> operand b of the products: lane 4g + c holds row g, channels of pair s and s + 4 of chunk c
    const auto fill_queries = [&] {
#pragma unroll 2
        for (int i = threadIdx.x; i < p.k_blocks * 4 * NT * 32; i += n_threads) {
            // neighbouring threads read neighbouring channels of one row
            const int s = i % 4;
            const int chunk = i / 4 % 4;
            const int row_in = i / 16 % R;
            const int b = i / 16 / R;
            const float* const from =
                first_row + row_in < n_rows ? p.q + static_cast<int64_t>(rows_at[row_in]) * p.q_width : nullptr;
            const int channel = 64 * b + 16 * chunk;
            queries[((b * 4 + s) * NT + row_in / 8) * 32 + row_in % 8 * 4 + chunk] =
                make_uint2(query_pair(from, p.q_width, channel + pair_channel(s)),
                           query_pair(from, p.q_width, channel + pair_channel(s + 4)));
        }
    };

    // what this thread knows of the row whose softmax it shares
    constexpr int row_threads = n_threads / R;
    const int my_row = threadIdx.x / row_threads;
    const int my_part = threadIdx.x % row_threads;
    const bool row_exists = first_row + my_row < n_rows;
    const int out_row = row_exists ? rows_at[my_row] : 0;
    const int my_token = out_row / p.n_head;
    const int my_head = out_row - my_token * p.n_head;
    const int my_pos = row_exists ? p.q_pos[my_token] : -1;
    const uint64_t my_seq = row_exists ? uint64_t{1} << p.q_seq[my_token] : 0;
    constexpr float log2_e = 1.4426950408889634f;
    const float scale = p.scale * log2_e;
    const float slope = row_exists && p.alibi_slopes != nullptr ? p.alibi_slopes[my_head] * log2_e : 0.0f;
    float row_max = -INFINITY;
    float row_sum = 0.0f;

    const int slot_warps = tile / 16;  // warps side by side over the slots; the others share channels
    const int k_slot = warp % slot_warps * 16;
    const int k_channel = warp / slot_warps;
    const int k_side = n_warps / slot_warps;
    const int v_side = channel_warps(p.v_blocks);
    const int v_channel = warp % v_side;
    const int v_slot = warp / v_side;
    const int v_slots = n_warps / v_side;
    float acc[NB][4][NT][4] = {};
    const int plane_pitch = tile + 8;

    int stage = 0;
    // iterations before the first tile only issue copies: one place in the code for them, which is fetched once
    const int ahead = p.stages - 1;
#pragma unroll 1
    for (int t = tile_begin - ahead; t < tile_end; t++) {
        __syncthreads();
        issue(t + ahead);
        if (t == tile_begin - ahead) fill_queries();  // while the first tile is under way
        if (t < tile_begin) continue;
        copies_wait(ahead);
        uint8_t* const k_rows = stages + stage * plan.stage;
        stage = stage + 1 == p.stages ? 0 : stage + 1;
        uint8_t* const v_rows = k_rows + tile * p.k_pitch;
        const auto* const seq = reinterpret_cast<const uint64_t*>(v_rows + tile * p.v_pitch);
        const auto* const pos = reinterpret_cast<const int32_t*>(seq + tile);
        const bool hole = static_cast<int>(threadIdx.x) < tile && seq[threadIdx.x] == 0;
        if (__syncthreads_or(hole)) {
            // free slots hold anything, NaN too: zero bytes decode to finite values in every format
            for (int s = warp; s < tile; s += n_warps) {
                if (seq[s] != 0) continue;
                for (int i = lane; i < p.v_pitch / 16; i += 32) {
                    reinterpret_cast<uint4*>(v_rows + s * p.v_pitch)[i] = make_uint4(0, 0, 0, 0);
                }
            }
        }
        const Chunk* const k_chunks = chunks + parts.region_of(t) * chunks_per_region;
        const Chunk* const v_chunks = k_chunks + 4 * p.k_blocks;

        {
            float sum[NT][4] = {};
            const uint8_t* const upper = k_rows + (k_slot + g) * p.k_pitch;
#pragma unroll 1
            for (int b = k_channel; b < p.k_blocks; b += k_side) {
                uint32_t x[8];
                uint32_t y[8];
                two_slots<Kind>(upper, upper + 8 * p.k_pitch, k_chunks[4 * b + c], x, y);
                const uint2* const q = queries + b * 4 * NT * 32 + lane;
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    const uint32_t a[4] = {x[s], y[s], x[s + 4], y[s + 4]};
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        const uint2 of = q[(s * NT + n) * 32];
                        mma(sum[n], a, of.x, of.y);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    planes[(k_channel * R + 8 * n + 2 * c + e % 2) * plane_pitch + k_slot + g + e / 2 * 8] = sum[n][e];
                }
            }
        }
        __syncthreads();

        {
            float* const score_of = planes + my_row * plane_pitch;
            float tile_max = -INFINITY;
#pragma unroll 2
            for (int s = my_part; s < tile; s += row_threads) {
                float score = score_of[s];
#pragma unroll 1
                for (int w = 1; w < k_side; w++) score += score_of[w * R * plane_pitch + s];
                const int distance = my_pos - pos[s];
                const bool seen = (seq[s] & my_seq) != 0 && distance >= 0 && (p.window == 0 || distance < p.window);
                score = seen ? score * scale - slope * static_cast<float>(distance) : -INFINITY;
                score_of[s] = score;
                tile_max = fmaxf(tile_max, score);
            }
#pragma unroll
            for (int o = row_threads / 2; o > 0; o /= 2) {
                tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, o));
            }
            const float new_max = fmaxf(row_max, tile_max);
            const float base = new_max == -INFINITY ? 0.0f : new_max;
            const float rescale = exp2f(row_max - base);
            row_sum *= rescale;
            row_max = new_max;
            if (my_part == 0) row_scale[my_row] = rescale;
#pragma unroll 2
            for (int s = my_part; s < tile; s += row_threads) {
                const __half w = __float2half_rn(exp2f(score_of[s] - base));
                weights[my_row * plane_pitch + s] = w;
                row_sum += __half2float(w);  // the weights as the product sees them
            }
        }
        __syncthreads();

#pragma unroll
        for (int n = 0; n < NT; n++) {
            const float2 by = *reinterpret_cast<const float2*>(row_scale + 8 * n + 2 * c);
            // a maximum rarely moves once a few tiles have passed
            if (!__any_sync(0xffffffffu, by.x != 1.0f || by.y != 1.0f)) continue;
#pragma unroll
            for (int b = 0; b < NB; b++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) acc[b][j][n][e] *= e % 2 == 0 ? by.x : by.y;
                }
            }
        }
#pragma unroll 1
        for (int k16 = v_slot; k16 < tile / 16; k16 += v_slots) {
            uint32_t w[NT][2];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const auto* const row =
                    reinterpret_cast<const uint32_t*>(weights + (8 * n + g) * plane_pitch + 16 * k16);
                w[n][0] = row[c];
                w[n][1] = row[c + 4];
            }
            const uint8_t* const slot = v_rows + (16 * k16 + 2 * c) * p.v_pitch;
#pragma unroll
            for (int n = 0; n < NB; n++) {
                const int b = v_channel + v_side * n;
                if (b < p.v_blocks) {
                    uint32_t first[8];
                    uint32_t second[8];
                    four_slots<Kind>(slot, p.v_pitch, v_chunks[4 * b + g / 2], g % 2, first, second);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const uint32_t a[4] = {first[2 * j], first[2 * j + 1], second[2 * j], second[2 * j + 1]};
#pragma unroll
                        for (int m = 0; m < NT; m++) mma(acc[n][j][m], a, w[m][0], w[m][1]);
                    }
                }
            }
        }
    }

    // every thread of a row holds its own part of the sum
#pragma unroll
    for (int o = row_threads / 2; o > 0; o /= 2) row_sum += __shfl_xor_sync(0xffffffffu, row_sum, o);

    // warps that took other slots of the same channels add theirs
    copies_wait(0);
    __syncthreads();
    auto* const merged = reinterpret_cast<float*>(stages);  // [R][64·v_blocks + 4]
    const int width = 64 * p.v_blocks;
    const int merged_pitch = width + 4;
#pragma unroll 1
    for (int turn = 0; turn < v_slots; turn++) {
        if (v_slot == turn) {
#pragma unroll
            for (int n = 0; n < NB; n++) {
                const int b = v_channel + v_side * n;
                if (b < p.v_blocks) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            // row g of V's tile i = 2j + e/2: chunk g/2, half g%2, pair i/2
                            const int i = 2 * j + e / 2;
                            const int channel =
                                64 * b + 16 * (g / 2) + 4 * (g % 2) + i / 2 % 2 + i / 4 * 8 + 2 * (i % 2);
#pragma unroll
                            for (int m = 0; m < NT; m++) {
                                float* const to = merged + (8 * m + 2 * c + e % 2) * merged_pitch + channel;
                                *to = turn == 0 ? acc[n][j][m][e] : *to + acc[n][j][m][e];
                            }
                        }
                    }
                }
            }
        }
        __syncthreads();
    }

    if (!row_exists) return;
    const float* const from = merged + my_row * merged_pitch;
    if (parts.count == 1 && p.v_b == nullptr) {
        const float inverse = row_sum > 0.0f ? 1.0f / row_sum : 0.0f;
#pragma unroll 2
        for (int d = my_part; d < p.head_dim; d += row_threads) {
            p.out[int64_t{out_row} * p.head_dim + d] = from[d] * inverse;
        }
    } else {
        const int64_t at = static_cast<int64_t>(split) * p.n_tokens * p.n_head + out_row;
        if (my_part == 0) reinterpret_cast<float2*>(p.partial_ml)[at] = make_float2(row_max, row_sum);
#pragma unroll 2
        for (int d = 4 * my_part; d < width; d += 4 * row_threads) {
            *reinterpret_cast<float4*>(p.partial + at * width + d) = *reinterpret_cast<const float4*>(from + d);
        }
    }
}

}  // namespace lkv::cuda
