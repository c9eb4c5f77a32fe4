// Attention of up to 32 query rows on a stored K of any width: many query heads that share one latent, or a few tokens.
// As in decode.cuh slots are the rows of both products; here the warps of a thread block share a tile:
//
//   scores    every warp dequantizes 16 slots of K (or its part of their channels) once and multiplies them with all queries,
//             which lie in shared memory in the order of the products' operands
//   softmax   by query row over the tile: online maximum and sum, weights as f16
//   values    every warp dequantizes its 64-channel blocks of V for all slots of the tile; sums stay in registers
//
// Rows of f16 are operands as they lie: matrix loads, channels in their order. Sixteen warps hide each other's chains of load,
// dequantize, product: with eight, joint latents of 512 took 72 us a layer at 65536 slots in q4, and 96 in f16.
#pragma once

#include "ops/cuda/args.h"
#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/copy.cuh"
#include "ops/cuda/dequant.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/parts.cuh"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

// NT: 8-row blocks of queries, 2 or 4. NB: 64-channel blocks of V per warp. Kind: as in with_chunk.
template <int NT, int NB, int Kind>
__global__ void __launch_bounds__(n_wide_threads, 1) wide_kernel(const __grid_constant__ AttnArgs p) {
    constexpr int R = 8 * NT;
    constexpr bool as_stored = Kind == kind_f16_wide;  // channels and slots in their order, by matrix loads
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
    auto* const queries = reinterpret_cast<uint2*>(shared + plan.groups + plan.chunks);  // [k_blocks][4][NT/2][32][2]
    uint8_t* const k_stages = reinterpret_cast<uint8_t*>(queries) + plan.queries;        // [stages][tile][k_pitch]
    uint8_t* const v_stages = k_stages + p.stages * tile * p.k_pitch;
    uint8_t* const marks = v_stages + p.stages * tile * p.v_pitch;  // [stages + 1] sequences, then positions
    auto* const planes = reinterpret_cast<float*>(marks + (p.stages + 1) * tile * 12);
    auto* const weights = reinterpret_cast<__half*>(reinterpret_cast<uint8_t*>(planes) + plan.planes);
    auto* const row_scale = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(weights) + plan.weights);

    const WorkItem item(p, blockIdx.x);
    const int first_row = blockIdx.y * R;

    __shared__ int32_t rows_at[R];  // of a query row: which of [n_tokens, n_head] it is
    __shared__ int32_t n_slots[max_regions];
    __shared__ uint64_t arrivals[2][max_wide_stages];  // of K and V rows that the copy engine brings
    if (static_cast<int>(threadIdx.x) < min(R, item.n_rows - first_row)) {
        rows_at[threadIdx.x] = item.row_at(p, first_row + static_cast<int>(threadIdx.x));
    }
    const int chunks_per_region = 4 * (p.k_blocks + p.v_blocks);
#pragma unroll 1
    for (int i = threadIdx.x; i < p.n_regions * chunks_per_region; i += n_wide_threads) {
        const int r = i / chunks_per_region;
        const int j = i - r * chunks_per_region;
        const bool is_k = j < 4 * p.k_blocks;
        const int first =
            is_k ? item.k_group * 4 * p.k_blocks + j
                 : p.n_kv / p.k_group * 4 * p.k_blocks + item.v_group * 4 * p.v_blocks + j - 4 * p.k_blocks;
        chunks[i] = p.regions[r].chunks[first];
    }
    if (static_cast<int>(threadIdx.x) < 2 * p.n_regions) {
        const RegionArgs& region = p.regions[threadIdx.x / 2];
        groups[threadIdx.x] = threadIdx.x % 2 == 0 ? region.k_groups[item.k_group] : region.v_groups[item.v_group];
        n_slots[threadIdx.x / 2] = p.n_slots[threadIdx.x / 2];
    }
    if (static_cast<int>(threadIdx.x) < 2 * p.stages) Arrivals(&arrivals[threadIdx.x % 2][threadIdx.x / 2]).init();
    __syncthreads();
    wait_for_previous();

    // K and the marks of tile i of this part, or V of the one before, whose buffers are free when K of tile i - stages has been
    // read and V of the one before that
    int issue_stage = 0;
    int issue_marks = 0;
    const auto issue = [&](int i, int side) {
        const int t = tile_begin + i - side;
        if (i >= side && t < tile_end) {
            const int r = parts.region_of(t);
            const RegionArgs& region = p.regions[r];
            const int first = (t - parts.tiles_before(r)) * tile;
            const int n = min(tile, n_slots[r] - first);
            if (side == 0 && static_cast<int>(threadIdx.x) < tile) {
                auto* const seq = reinterpret_cast<uint64_t*>(marks + issue_marks * tile * 12);
                auto* const pos = reinterpret_cast<int32_t*>(seq + tile);
                const int s = threadIdx.x;
                if (s < n) {
                    copy_async<8>(seq + s, region.seq + first + s);
                    copy_async<4>(pos + s, region.pos + first + s);
                } else {
                    seq[s] = 0;
                    pos[s] = 0;
                }
            }
            // V's buffer is the one before K's
            const int pitch = side == 0 ? p.k_pitch : p.v_pitch;
            const int at = side == 0 ? issue_stage : (issue_stage == 0 ? p.stages : issue_stage) - 1;
            uint8_t* const to = (side == 0 ? k_stages : v_stages) + at * tile * pitch;
            const uint8_t* const rows = side == 0 ? region.k_rows : region.v_rows;
            const uint32_t row_bytes = side == 0 ? region.k_row_bytes : region.v_row_bytes;
            const GroupTable& group = groups[2 * r + side];
            const bool whole = static_cast<int>(row_bytes) == pitch && group.first == 0;
            const bool bulk = has_bulk_copies && !whole && group.access_bits == 4 && group.bytes > 0;
            const Arrivals rows_arrive(&arrivals[side][at]);
            if (threadIdx.x == 0) rows_arrive.announce(bulk ? n * group.bytes : 0);
            if (whole) {
                copy_whole_rows<n_wide_threads>(threadIdx.x, to, rows + int64_t{first} * pitch, n * pitch);
            } else if (bulk) {
                const int s = threadIdx.x;
                if (s < n) {
                    rows_arrive.copy(to + s * pitch, rows + static_cast<int64_t>(first + s) * row_bytes + group.first,
                                     group.bytes);
                }
            } else {
                copy_rows<n_wide_threads>(threadIdx.x, to, pitch, rows, row_bytes, group, first, n);
            }
        }
        if (side == 0) {
            issue_stage = issue_stage + 1 == p.stages ? 0 : issue_stage + 1;
            issue_marks = issue_marks == p.stages ? 0 : issue_marks + 1;
        }
        copies_commit();
    };
    // queries [row][channel] f32 -> operand b of the products, two blocks of 8 rows in a 16-byte word: lane 4g + c holds row g,
    // channels of pair s and s + 4 of chunk c; as stored: channels 2c, 2c + 1, 2c + 8, 2c + 9 of chunk s
    const auto fill_queries = [&] {
    // neighbouring threads read neighbouring channels of one row
#pragma unroll 4
        for (int i = threadIdx.x; i < p.k_blocks * 8 * R; i += n_wide_threads) {
            const int half = i % 2;  // channels 4·half … 4·half + 3 and 8 + those of a chunk
            const int chunk = i / 2 % 4;
            const int row = i / 8 % R;
            const int b = i / 8 / R;
            const float* const from =
                first_row + row < item.n_rows ? p.q + static_cast<int64_t>(rows_at[row]) * p.q_width : nullptr;
            const int channel = 64 * b + 16 * chunk + 4 * half;
            const float4 x = four_floats(from, p.q_width, channel);
            const float4 y = four_floats(from, p.q_width, channel + 8);
            const auto word = [&](float a, float b) { return bits(__floats2half2_rn(a, b)); };
            const auto to = [&](int s, int at) -> uint2& {
                return queries[(((b * 4 + s) * (NT / 2) + row / 16) * 32 + row % 8 * 4 + at) * 2 + row / 8 % 2];
            };
            if constexpr (as_stored) {
                to(chunk, 2 * half) = make_uint2(word(x.x, x.y), word(y.x, y.y));
                to(chunk, 2 * half + 1) = make_uint2(word(x.z, x.w), word(y.z, y.w));
            } else {
                to(2 * half, chunk) = make_uint2(word(x.x, x.z), word(y.x, y.z));
                to(2 * half + 1, chunk) = make_uint2(word(x.y, x.w), word(y.y, y.w));
            }
        }
    };

    // what this thread knows of the row whose softmax it shares
    constexpr int row_threads = n_wide_threads / R;
    constexpr int steps = max_wide_tile / (2 * row_threads);  // two neighbouring slots a thread and step
    const int my_row = threadIdx.x / row_threads;
    const int my_part = threadIdx.x % row_threads;
    const bool row_exists = first_row + my_row < item.n_rows;
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

    // warps side by side over the slots; the others share channels, but for small tiles some rest
    const int slot_bits = __ffs(tile) - 5;
    const int k_slot = (warp & ((1 << slot_bits) - 1)) * 16;
    const int k_channel = warp >> slot_bits;
    const int k_side = wide_k_side(tile);
    const int v_side = wide_channel_warps(p.v_blocks);
    const int v_channel = warp & (v_side - 1);
    const int v_slot = warp >> (__ffs(v_side) - 1);
    const int v_slots = n_wide_warps >> (__ffs(v_side) - 1);
    float acc[NB][4][NT][4] = {};
    const int plane_pitch = tile + 8;

    int stage = 0;
    uint32_t phase = 0;
    int marks_stage = 0;
    // steps before the first tile only issue copies: one place in the code for them, which is fetched once
    const int ahead = p.stages;
#pragma unroll 1
    for (int step = -ahead; step < 0 || tile_begin + step < tile_end; step++) {
        const auto* const seq = reinterpret_cast<const uint64_t*>(marks + marks_stage * tile * 12);
        const auto* const pos = reinterpret_cast<const int32_t*>(seq + tile);
        const int region = parts.region_of(tile_begin + step);
        const Chunk* const k_chunks = chunks + region * chunks_per_region;
        [[maybe_unused]] const int k_kind = groups[2 * region].kind;
        [[maybe_unused]] const int v_kind = groups[2 * region + 1].kind;
        int holes = 0;
        // one place in the code for the copies
#pragma unroll 1
        for (int side = 1; side >= 0; side--) {
            if (step >= 0 && side == 1) {
                copies_wait(2 * ahead - 2);
                Arrivals(&arrivals[0][stage]).wait(phase);
                holes = __syncthreads_or(static_cast<int>(threadIdx.x) < tile && seq[threadIdx.x] == 0);
            }
            if (step >= 0 && side == 0) {
                const uint8_t* const k_rows = k_stages + stage * tile * p.k_pitch;
                float sum[NT][4] = {};
                const uint8_t* const upper = k_rows + (k_slot + g) * p.k_pitch;
#pragma unroll 1
                for (int b = k_channel < k_side ? k_channel : p.k_blocks; b < p.k_blocks; b += k_side) {
                    uint32_t a[4][4];
                    if constexpr (as_stored) {
#pragma unroll
                        for (int s = 0; s < 4; s++) {
                            load_a(a[s], k_rows + k_slot * p.k_pitch + k_chunks[4 * b + s].codes, p.k_pitch, lane);
                        }
                    } else {
                        uint32_t x[8];
                        uint32_t y[8];
                        with_group_kind<Kind>(k_kind, [&](auto kind) __attribute__((always_inline)) {
                            two_slots<decltype(kind)::value>(upper, upper + 8 * p.k_pitch, k_chunks[4 * b + c], x, y);
                        });
#pragma unroll
                        for (int s = 0; s < 4; s++) {
                            a[s][0] = x[s];
                            a[s][1] = y[s];
                            a[s][2] = x[s + 4];
                            a[s][3] = y[s + 4];
                        }
                    }
                    const auto* const q = reinterpret_cast<const uint4*>(queries) + b * 4 * (NT / 2) * 32 + lane;
#pragma unroll
                    for (int s = 0; s < 4; s++) {
#pragma unroll
                        for (int n = 0; n < NT; n += 2) {
                            const uint4 of = q[(s * (NT / 2) + n / 2) * 32];
                            mma(sum[n], a[s], of.x, of.y);
                            mma(sum[n + 1], a[s], of.z, of.w);
                        }
                    }
                }
                if (k_channel < k_side) {
#pragma unroll
                    for (int n = 0; n < NT; n++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            planes[(k_channel * R + 8 * n + 2 * c + e % 2) * plane_pitch + k_slot + g + e / 2 * 8] =
                                sum[n][e];
                        }
                    }
                }
                __syncthreads();
            }
            issue(step + ahead, side);
        }
        if (step < 0) {
            if (step == -ahead) fill_queries();  // while the first tile is under way
            continue;
        }

        {
            const float* const score_of = planes + my_row * plane_pitch + 2 * my_part;
            float2 score[steps];
#pragma unroll
            for (int i = 0; i < steps; i++) score[i] = make_float2(0.0f, 0.0f);
#pragma unroll 1
            for (int w = 0; w < k_side; w++) {
#pragma unroll
                for (int i = 0; i < steps; i++) {
                    const int s = 2 * (my_part + i * row_threads);
                    if (s >= tile) break;
                    const float2 x =
                        *reinterpret_cast<const float2*>(score_of + w * R * plane_pitch + 2 * i * row_threads);
                    score[i].x += x.x;
                    score[i].y += x.y;
                }
            }
            float tile_max = -INFINITY;
#pragma unroll
            for (int i = 0; i < steps; i++) {
                const int s = 2 * (my_part + i * row_threads);
                if (s >= tile) break;
                const auto of = *reinterpret_cast<const ulonglong2*>(seq + s);
                const int2 at = *reinterpret_cast<const int2*>(pos + s);
                const auto masked = [&](float x, uint64_t slot_seq, int slot_pos) {
                    const int distance = my_pos - slot_pos;
                    const bool seen =
                        (slot_seq & my_seq) != 0 && distance >= 0 && (p.window == 0 || distance < p.window);
                    return seen ? x * scale - slope * static_cast<float>(distance) : -INFINITY;
                };
                score[i].x = masked(score[i].x, of.x, at.x);
                score[i].y = masked(score[i].y, of.y, at.y);
                tile_max = fmaxf(tile_max, fmaxf(score[i].x, score[i].y));
            }
#pragma unroll
            for (int o = row_threads / 2; o > 0; o /= 2) {
                tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, o));
            }
            const float new_max = tile_max > row_max + stale_max ? tile_max : row_max;
            const float base = new_max == -INFINITY ? 0.0f : new_max;
            const float rescale = exp2f(row_max - base);
            row_sum *= rescale;
            row_max = new_max;
            if (my_part == 0) row_scale[my_row] = rescale;
#pragma unroll
            for (int i = 0; i < steps; i++) {
                const int s = 2 * (my_part + i * row_threads);
                if (s >= tile) break;
                const __half2 w = __floats2half2_rn(exp2f(score[i].x - base), exp2f(score[i].y - base));
                // as the lanes hold a product's slots: 4c … 4c + 3 of 16 in lane c, as stored 2c, 2c + 1, 2c + 8, 2c + 9
                const int to = as_stored ? s : s / 16 * 16 + s / 2 % 2 * 8 + s / 4 % 4 * 2;
                *reinterpret_cast<__half2*>(weights + my_row * plane_pitch + to) = w;
                const float2 as_used = __half22float2(w);  // the weights as the product sees them
                row_sum += as_used.x + as_used.y;
            }
        }
        copies_wait(2 * ahead - 1);
        Arrivals(&arrivals[1][stage]).wait(phase);
        __syncthreads();
        uint8_t* const v_rows = v_stages + stage * tile * p.v_pitch;
        const Chunk* const v_chunks = k_chunks + 4 * p.k_blocks;
        if (holes != 0) {
            // free slots hold anything, NaN too: zero bytes decode to finite values in every format
            for (int s = warp; s < tile; s += n_wide_warps) {
                if (seq[s] != 0) continue;
                for (int i = lane; i < p.v_pitch / 4; i += 32) {
                    reinterpret_cast<uint32_t*>(v_rows + s * p.v_pitch)[i] = 0;
                }
            }
            before_bulk_copies();
            __syncthreads();
        }
        stage = stage + 1 == p.stages ? 0 : stage + 1;
        if (stage == 0) phase ^= 1;
        marks_stage = marks_stage == p.stages ? 0 : marks_stage + 1;

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
            uint32_t w[NT / 2][4];  // of two blocks of 8 rows: slots of the first and the second half
#pragma unroll
            for (int n = 0; n < NT / 2; n++) {
                load_b_pair(w[n], weights + 16 * n * plane_pitch + 16 * k16, 2 * plane_pitch, lane);
            }
            const uint8_t* const slot = v_rows + (16 * k16 + (as_stored ? 0 : 4 * c)) * p.v_pitch;
#pragma unroll
            for (int n = 0; n < NB; n++) {
                const int b = v_channel + v_side * n;
                if (b < p.v_blocks) {
                    uint32_t a[4][4];
                    if constexpr (as_stored) {
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            load_a_transposed(a[j], slot + v_chunks[4 * b + j].codes, p.v_pitch, lane);
                        }
                    } else {
                        uint32_t first[8];
                        uint32_t second[8];
                        with_group_kind<Kind>(v_kind, [&](auto kind) __attribute__((always_inline)) {
                            four_slots<decltype(kind)::value, 2>(slot, p.v_pitch, v_chunks[4 * b + g / 2], g % 2, first,
                                                                 second);
                        });
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            a[j][0] = first[2 * j];
                            a[j][1] = first[2 * j + 1];
                            a[j][2] = second[2 * j];
                            a[j][3] = second[2 * j + 1];
                        }
                    }
#pragma unroll
                    for (int j = 0; j < 4; j++) {
#pragma unroll
                        for (int m = 0; m < NT; m++) {
                            mma(acc[n][j][m], a[j], w[m / 2][m % 2 * 2], w[m / 2][m % 2 * 2 + 1]);
                        }
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
    auto* const merged =
        reinterpret_cast<float*>(k_stages);  // [R][64·v_blocks + 4], channels as the products leave them
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
                            const int place = 64 * b + 8 * (2 * j + e / 2) + g;
#pragma unroll
                            for (int m = 0; m < NT; m++) {
                                float* const to = merged + (8 * m + 2 * c + e % 2) * merged_pitch + place;
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
    // row g of a block's tile i: as stored channel 8i + g, else chunk g/2, half g%2 and of it pair i/2, second if i is odd
    const auto channels_at = [&](int d) {
        if constexpr (as_stored) return *reinterpret_cast<const float4*>(from + d);
        const float* const at = from + d / 64 * 64 + d / 8 % 2 * 32 + d / 16 % 4 * 2 + d / 4 % 2;
        return make_float4(at[0], at[16], at[8], at[24]);
    };
    if (parts.count == 1 && p.v_b == nullptr) {
        const float inverse = row_sum > 0.0f ? 1.0f / row_sum : 0.0f;
#pragma unroll 1
        for (int d = 4 * my_part; d < p.head_dim; d += 4 * row_threads) {
            const float4 x = channels_at(d);
            *reinterpret_cast<float4*>(p.out + int64_t{out_row} * p.head_dim + d) =
                make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
        }
    } else {
        const int64_t at = static_cast<int64_t>(split) * p.n_tokens * p.n_head + out_row;
        if (my_part == 0) reinterpret_cast<float2*>(p.partial_ml)[at] = make_float2(row_max, row_sum);
#pragma unroll 2
        for (int d = 4 * my_part; d < width; d += 4 * row_threads) {
            *reinterpret_cast<float4*>(p.partial + at * width + d) = channels_at(d);
        }
    }
}

}  // namespace lkv::cuda
