// Attention for few query rows: up to 8 (tokens x the query heads that share this K and this V).
// Slots are the rows of both products and the queries their 8 columns, so that no row of a tensor-core tile is wasted:
//
//   scores [16 slots x 8 queries] = K [16 slots x channels] · qᵀ   (K rebuild: rebuild.cuh makes K first)
//   sums [16 channels x 8 queries] += Vᵀ [16 channels x 16 slots] · weights
//
// Every warp walks slots of its own, with its own copies in flight and its own maximum and sums; nothing waits for another
// warp until the end of a part. A stored byte is copied once and dequantized once, in registers.
#pragma once

#include "ops/cuda/args.h"
#include "ops/cuda/decode/rebuild.cuh"
#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/rows/copy.cuh"
#include "ops/cuda/rows/dequant.cuh"
#include "ops/cuda/shared_plan.h"
#include "ops/cuda/softmax/finish.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// Where scores come from: the rows as stored, or keys rebuilt by each warp.
enum class KPath { stored, rebuilt };

// KB, VB: 64-channel blocks of a K and a V group. MT: 16-slot steps of a warp's tile. Kind: as in with_chunk.
template <int KB, int VB, int MT, int Kind, KPath Path>
__global__ void __launch_bounds__(Path == KPath::rebuilt && KB == 1 ? 2 * n_threads : n_threads,
                                  Path == KPath::stored && KB + VB <= 4 ? 2 : 1)
    decode_kernel(const __grid_constant__ AttnArgs p) {
    constexpr bool REBUILD = Path != KPath::stored;
    constexpr int fixed_threads = Path == KPath::rebuilt && KB == 1 ? 0 : n_threads;
    const int threads = block_threads<fixed_threads>();
    const int warps = threads / 32;
    constexpr int tile = 16 * MT;
    constexpr bool k_in_place = decode_reads_k_in_place(REBUILD, KB, Kind);
    constexpr int n_rows_max = decode_rows;
    extern __shared__ __align__(16) uint8_t shared[];
    let_next_start();
    const Parts parts(p);
    const int split = blockIdx.y;
    if (split >= parts.count) return;
    const DecodePlan plan(p);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g = lane / 4;
    const int c = lane % 4;

    const WorkItem item(p, blockIdx.x);
    const int tile_begin = parts.begin(split);
    const int tile_end = parts.begin(split + 1);

    // every region's groups and chunks, once for all warps
    auto* const groups = reinterpret_cast<GroupTable*>(shared);  // [n_regions][K, V]
    auto* const chunks = reinterpret_cast<Chunk*>(shared + plan.groups);
    auto* const queries = reinterpret_cast<uint2*>(shared + plan.groups + plan.chunks);  // [KB][4][32]
    uint8_t* const own = shared + plan.common() + warp * plan.own;
    // [stages] rows of K, of V; direct: sequences, positions
    uint8_t* const stages = own + plan.turned;
    [[maybe_unused]] WarpRebuild keys(reinterpret_cast<uint8_t*>(queries), plan, own);
    const int stage_bytes = tile * (p.k_pitch + p.v_pitch + (REBUILD ? 0 : 12));
    uint8_t* const marks = REBUILD ? stages + p.stages * stage_bytes : stages + tile * (p.k_pitch + p.v_pitch);
    const int marks_bytes = REBUILD ? tile * 12 : stage_bytes;
    __shared__ int32_t rows_at[n_rows_max];  // of a query row: which of [n_tokens, n_head] it is
    __shared__ int32_t n_slots[max_regions];
    if (static_cast<int>(threadIdx.x) < item.n_rows) {
        rows_at[threadIdx.x] = item.row_at(p, threadIdx.x);
    }
    if (static_cast<int>(threadIdx.x) < p.n_regions) n_slots[threadIdx.x] = p.n_slots[threadIdx.x];
    constexpr int chunks_per_region = 4 * (KB + VB);
    load_tables<KB, VB>(p, item, threads, groups, chunks);
    if constexpr (REBUILD) keys.fill(p, item.head_kv);
    __syncthreads();
    wait_for_previous();

    // neighbouring tiles that a warp takes at once: as many as one turn of the queries serves, if that leaves no warp without
    int run_bits = 0;
    if constexpr (REBUILD) {
        while (tile << run_bits < angle_span && warps << (run_bits + 1) <= tile_end - tile_begin) run_bits++;
    }
    const auto tile_at = [&](int i) {
        return tile_begin + (((i >> run_bits) * warps + warp) << run_bits) + (i & ((1 << run_bits) - 1));
    };
    // Direct: all of tile i. Rebuild: K and the marks of tile i and V of the one before, whose buffers are free when K of tile
    // i - stages has been read; the scores take long enough for V to arrive.
    int issue_stage = 0;
    int issue_marks = 0;
    const auto issue = [&](int i) {
        const auto copy_side = [&](int side, int r, int first, int n, int at) {
            uint8_t* const to = stages + at * stage_bytes + (side == 0 ? 0 : tile * p.k_pitch);
            const int pitch = side == 0 ? p.k_pitch : p.v_pitch;
            const uint8_t* const rows = side == 0 ? p.regions[r].k_rows : p.regions[r].v_rows;
            const uint32_t row_bytes = side == 0 ? p.regions[r].k_row_bytes : p.regions[r].v_row_bytes;
            copy_rows<32, REBUILD ? 2 : 1>(lane, to, pitch, rows, row_bytes, groups[2 * r + side], first, n);
        };
        const auto copy_marks = [&](int r, int first, int n, uint8_t* to) {
            auto* const seq = reinterpret_cast<uint64_t*>(to);
            auto* const pos = reinterpret_cast<int32_t*>(seq + tile);
            if (lane < tile) {
                if (lane < n) {
                    copy_async<8>(seq + lane, p.regions[r].seq + first + lane);
                    copy_async<4>(pos + lane, p.regions[r].pos + first + lane);
                } else {
                    seq[lane] = 0;
                    pos[lane] = 0;
                }
            }
        };
        if constexpr (!REBUILD) {
            const int t = tile_at(i);
            if (t < tile_end) {
                const int r = parts.region_of(t);
                const int first = (t - parts.tiles_before(r)) * tile;
                const int n = min(tile, n_slots[r] - first);
                copy_marks(r, first, n, stages + issue_stage * stage_bytes + tile * (p.k_pitch + p.v_pitch));
                copy_side(0, r, first, n, issue_stage);
                copy_side(1, r, first, n, issue_stage);
            }
        } else {
#pragma unroll 1
            for (int side = 0; side < 2; side++) {
                const int t = tile_at(i - side);
                if (i < side) continue;
                if (t >= tile_end) continue;
                const int r = parts.region_of(t);
                const int first = (t - parts.tiles_before(r)) * tile;
                const int n = min(tile, n_slots[r] - first);
                if (side == 0) copy_marks(r, first, n, marks + issue_marks * marks_bytes);
                if (k_in_place && side == 0) continue;
                // V's stage is the one before K's
                const int at = side == 0 ? issue_stage : (issue_stage == 0 ? p.stages : issue_stage) - 1;
                copy_side(side, r, first, n, at);
            }
            issue_marks = issue_marks == p.stages ? 0 : issue_marks + 1;
        }
        issue_stage = issue_stage + 1 == p.stages ? 0 : issue_stage + 1;
        copies_commit();
    };
    const auto query_row = [&](int row) -> const float* {
        return row < item.n_rows ? p.q + static_cast<int64_t>(rows_at[row]) * p.q_width : nullptr;
    };
    const auto fill_queries = [&] {
        if constexpr (REBUILD) {
            keys.fill_queries(p, threadIdx.x, threads, query_row);
            keys.wait(p.stages);
        } else {
#pragma unroll 1
            for (int i = threadIdx.x; i < n_rows_max * KB * 16; i += threads) {
                const int row = i / (KB * 16);
                const int at = i % (KB * 16);  // (block, chunk, step)
                const int s = at % 4;
                const float* const from = query_row(row);
                const int channel = at / 4 * 16;
                queries[(at / 16 * 4 + s) * 32 + row * 4 + at / 4 % 4] =
                    make_uint2(query_pair(from, p.q_width, channel + pair_channel(s)),
                               query_pair(from, p.q_width, channel + pair_channel(s + 4)));
            }
        }
        __syncthreads();
    };
    uint32_t q[KB][4][2] = {};

    // what this thread knows of query rows 2c and 2c+1
    constexpr float log2_e = 1.4426950408889634f;
    const float scale = p.scale * log2_e;
    int my_pos[2];
    uint64_t my_seq[2];
    float slope[2];
    float row_max[2] = {-INFINITY, -INFINITY};
    float row_sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = 2 * c + i;
        const bool exists = row < item.n_rows;
        const int at = exists ? rows_at[row] : 0;
        const int token = at / p.n_head;
        my_pos[i] = exists ? p.q_pos[token] : -1;
        my_seq[i] = exists ? uint64_t{1} << p.q_seq[token] : 0;
        slope[i] = exists && p.alibi_slopes != nullptr ? p.alibi_slopes[at - token * p.n_head] * log2_e : 0.0f;
    }
    float acc[VB][4][4] = {};

    int stage = 0;
    int marks_stage = 0;
    // steps before the first tile only issue copies: one place in the code for them, which is fetched once
    const int ahead = REBUILD ? p.stages : p.stages - 1;
#pragma unroll 1
    for (int step = -ahead; step < 0 || tile_at(step) < tile_end; step++) {
        if constexpr (!REBUILD) {
            __syncwarp();
            issue(step + ahead);
        }
        const int t = tile_at(max(step, 0));
        uint8_t* const k_rows = stages + stage * stage_bytes;
        const Chunk* const k_chunks = chunks + parts.region_of(t) * chunks_per_region;
        const auto k_row = [&](int slot) -> const uint8_t* {
            const int r = parts.region_of(t);
            const int first = (t - parts.tiles_before(r)) * tile;
            if constexpr (!k_in_place) return k_rows + slot * p.k_pitch;
            // past the last slot any row will do
            const int at = min(first + slot, n_slots[r] - 1);
            return p.regions[r].k_rows + static_cast<int64_t>(at) * p.regions[r].k_row_bytes + groups[2 * r].first;
        };
        float s[MT][4] = {};
        [[maybe_unused]] uint32_t latents[KB][MT][4][4];
        if (step >= 0) {
            copies_wait(p.stages - 1);
            __syncwarp();
            with_group_kind<Kind>(groups[2 * parts.region_of(t)].kind, [&](auto kind) __attribute__((always_inline)) {
#pragma unroll
                for (int b = 0; b < KB; b++) {
                    const Chunk chunk = k_chunks[4 * b + c];
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        uint32_t x[8];
                        uint32_t y[8];
                        two_slots<decltype(kind)::value>(k_row(16 * m + g), k_row(16 * m + g + 8), chunk, x, y);
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            const uint32_t a[4] = {x[j], y[j], x[j + 4], y[j + 4]};
                            if constexpr (REBUILD) {
#pragma unroll
                                for (int e = 0; e < 4; e++) latents[b][m][j][e] = a[e];
                            } else {
                                mma(s[m], a, q[b][j][0], q[b][j][1]);
                            }
                        }
                    }
                }
            });
        }
        if constexpr (REBUILD) {
            __syncwarp();
            issue(step + ahead);
        }
        if (step < 0) {
            if (step < -1) continue;
            fill_queries();  // while the first tile is under way
            if constexpr (!REBUILD) {
#pragma unroll
                for (int b = 0; b < KB; b++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const uint2 of = queries[(b * 4 + i) * 32 + lane];
                        q[b][i][0] = of.x;
                        q[b][i][1] = of.y;
                    }
                }
            }
            continue;
        }
        uint8_t* const v_rows = k_rows + tile * p.k_pitch;
        const auto* const seq =
            reinterpret_cast<const uint64_t*>(marks + (REBUILD ? marks_stage : stage) * marks_bytes);
        const auto* const pos = reinterpret_cast<const int32_t*>(seq + tile);
        stage = stage + 1 == p.stages ? 0 : stage + 1;
        if constexpr (REBUILD) marks_stage = marks_stage == p.stages ? 0 : marks_stage + 1;
        const Chunk* const v_chunks = k_chunks + 4 * KB;
        if constexpr (REBUILD) keys.template score<KB, MT>(p, latents, seq, pos, s);

        // s[m]: slots 16m + g and 16m + g + 8 for query rows 2c and 2c+1
        float tile_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int slot = 16 * m + g + 8 * h;
                const uint64_t slot_seq = seq[slot];
                const int slot_pos = pos[slot];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int distance = my_pos[i] - slot_pos;
                    const bool seen =
                        (slot_seq & my_seq[i]) != 0 && distance >= 0 && (p.window == 0 || distance < p.window);
                    float& x = s[m][2 * h + i];
                    x = seen ? x * scale - slope[i] * static_cast<float>(distance) : -INFINITY;
                    tile_max[i] = fmaxf(tile_max[i], x);
                }
            }
        }
        float base[2];
        bool moved = false;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int o = 4; o < 32; o *= 2)
                tile_max[i] = fmaxf(tile_max[i], __shfl_xor_sync(0xffffffffu, tile_max[i], o));
            moved = moved || tile_max[i] > row_max[i] + stale_max;
        }
        if (__any_sync(0xffffffffu, moved)) {
            float rescale[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float old = row_max[i];
                row_max[i] = fmaxf(old, tile_max[i]);
                rescale[i] = row_max[i] == -INFINITY ? 1.0f : exp2f(old - row_max[i]);
                row_sum[i] *= rescale[i];
            }
#pragma unroll
            for (int b = 0; b < VB; b++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) acc[b][j][e] *= rescale[e % 2];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) base[i] = row_max[i] == -INFINITY ? 0.0f : row_max[i];

        uint32_t w[MT][2];
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const __half2 weight =
                    __floats2half2_rn(exp2f(s[m][2 * h] - base[0]), exp2f(s[m][2 * h + 1] - base[1]));
                const float2 as_used = __half22float2(weight);  // the weights as the product sees them
                row_sum[0] += as_used.x;
                row_sum[1] += as_used.y;
                w[m][h] = transposed(bits(weight));
            }
        }

        if constexpr (REBUILD) {
            copies_wait(p.stages - 1);
            __syncwarp();
        }
        unsigned holes = __ballot_sync(0xffffffffu, lane < tile && seq[lane % tile] == 0);
        if (holes != 0) {
            // free slots hold anything, NaN too: zero bytes decode to finite values in every format
            for (; holes != 0; holes &= holes - 1) {
                const int s = __ffs(static_cast<int>(holes)) - 1;
                for (int i = lane; i < p.v_pitch / 16; i += 32) {
                    reinterpret_cast<uint4*>(v_rows + s * p.v_pitch)[i] = make_uint4(0, 0, 0, 0);
                }
            }
            __syncwarp();
        }
        with_group_kind<Kind>(groups[2 * parts.region_of(t) + 1].kind, [&](auto kind) __attribute__((always_inline)) {
#pragma unroll
            for (int b = 0; b < VB; b++) {
                const Chunk chunk = v_chunks[4 * b + g / 2];
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    uint32_t first[8];
                    uint32_t second[8];
                    four_slots<decltype(kind)::value>(v_rows + (16 * m + 2 * c) * p.v_pitch, p.v_pitch, chunk, g % 2,
                                                      first, second);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const uint32_t a[4] = {first[2 * j], first[2 * j + 1], second[2 * j], second[2 * j + 1]};
                        mma(acc[b][j], a, w[m][0], w[m][1]);
                    }
                }
            }
        });
    }

    // the warps' sums meet where the tiles were
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int o = 4; o < 32; o *= 2) row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], o);
    }
    copies_wait(0);
    __syncthreads();
    constexpr int width = 64 * VB;
    auto* const ml = reinterpret_cast<float2*>(shared);             // [warps][n_rows_max] maximum, sum
    auto* const all = ml + warps * n_rows_max;                      // [n_rows_max] of all warps
    auto* const sums = reinterpret_cast<float*>(all + n_rows_max);  // [warps][item.n_rows][width + 8]
    constexpr int pitch = width + 8;
    if (g == 0) {
        ml[warp * n_rows_max + 2 * c] = make_float2(row_max[0], row_sum[0]);
        ml[warp * n_rows_max + 2 * c + 1] = make_float2(row_max[1], row_sum[1]);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int row = 2 * c + e % 2;
        if (row < item.n_rows) {
            float* const to = sums + (warp * item.n_rows + row) * pitch;
#pragma unroll
            for (int b = 0; b < VB; b++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    to[64 * b + sum_channel(g, 2 * j + e / 2)] = acc[b][j][e];
                }
            }
        }
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < warps * n_rows_max) {
        // as many neighbours as warps hold a row's maxima and sums
        const int row = threadIdx.x / warps;
        float2& of = ml[threadIdx.x % warps * n_rows_max + row];
        float top = of.x;
#pragma unroll 1
        for (int o = 1; o < warps; o *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
        const float share = of.x == -INFINITY ? 0.0f : exp2f(of.x - top);
        float total = share * of.y;
#pragma unroll 1
        for (int o = 1; o < warps; o *= 2) total += __shfl_xor_sync(0xffffffffu, total, o);
        of.x = share;
        if (threadIdx.x % warps == 0) all[row] = make_float2(top, total);
    }
    __syncthreads();
    // [item.n_rows][width], over the first warp's sums
    end_part<fixed_threads, KB == 1 && VB == 1>(
        p, parts, item, split, rows_at, all, 64 * VB, shared, sums, pitch, [&](int row, int d) {
            float sum = 0.0f;
#pragma unroll 8
            for (int w = 0; w < warps; w++)
                sum += ml[w * n_rows_max + row].x * sums[(w * item.n_rows + row) * pitch + d];
            return sum;
        });
}

}  // namespace lkv::cuda
