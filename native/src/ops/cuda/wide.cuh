// Attention of up to 32 query rows on a stored K of any width: many query heads that share one latent, or a few tokens.
// As in decode.cuh slots are the rows of both products; here the warps of a thread block share a tile:
//
//   scores    every warp dequantizes 16 slots of K (or its part of their channels) once and multiplies them with all queries,
//             which lie in shared memory in the order of the products' operands
//   softmax   by query row over the tile: online maximum and sum, weights as f16
//   values    every warp dequantizes its 64-channel blocks of V for all slots of the tile; sums stay in registers
//
// A step takes K of one tile and V of the one before, with two barriers: behind the scores, when K's buffer is free, and behind
// softmax and values, when V's is. With three and one phase behind the other a latent of 1024 took 143 us a layer at 65536 slots in
// f16, now 110. Two thread blocks may split the channels (Pair): each multiplies V while the other's half of the scores comes.
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
#include "ops/cuda/pair.cuh"
#include "ops/cuda/parts.cuh"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

// NT: 8-row blocks of queries, 2 or 4. NB: 64-channel blocks of V per warp. Kind: as in with_chunk. Pair: two thread blocks of a
// cluster share a part: all its query rows, half of K's channels and half of V's each.
template <int NT, int NB, int Kind, bool Pair>
__global__ void __launch_bounds__(n_wide_threads, 1)
    wide_kernel(const __grid_constant__ AttnArgs p, const __grid_constant__ WidePlan plan) {
    constexpr int R = 8 * NT;
    constexpr bool as_stored = Kind == kind_f16_wide;  // channels and slots in their order, by matrix loads
    if constexpr (Pair && !has_clusters) return;       // never launched: see has_pairs
    extern __shared__ __align__(16) uint8_t shared[];
    let_next_start();
    const int split = blockIdx.z;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const int rank = Pair ? pair_rank() : 0;
    const int k_first = Pair ? rank * plan.k_blocks : 0;  // this thread block's 64-channel blocks of K and of V
    const int v_first = Pair ? rank * plan.v_blocks : 0;
    const int k_blocks = Pair ? min(plan.k_blocks, p.k_blocks - k_first) : p.k_blocks;
    const int v_blocks = Pair ? min(plan.v_blocks, p.v_blocks - v_first) : p.v_blocks;

    auto* const sources = reinterpret_cast<WideSource*>(shared);  // [n_regions][K, V]
    auto* const chunks = reinterpret_cast<Chunk*>(shared + plan.chunks);
    auto* const queries = reinterpret_cast<uint2*>(shared + plan.queries);  // [k_blocks][4][NT/2][32][2]
    const auto seq_of = [&](int i, int tile) {
        return reinterpret_cast<uint64_t*>(shared + plan.marks + (i & (wide_marks - 1)) * tile * 12);
    };

    const WorkItem item(p, blockIdx.x);
    const int first_row = Pair ? 0 : blockIdx.y * R;

    __shared__ WideRow rows[R];
    __shared__ uint64_t arrivals[2][max_wide_stages];  // of K and V rows that the copy engine brings
    __shared__ uint64_t scores_arrive[2];              // from the other of a pair
    constexpr float log2_e = 1.4426950408889634f;
    int tile, tile_begin, n_tiles;
    bool only_part;
    {
        const Parts parts(p);
        if (split >= parts.count) return;
        only_part = parts.count == 1;
        tile = parts.tile;
        tile_begin = parts.begin(split);
        n_tiles = parts.begin(split + 1) - tile_begin;
        const int per_region = 4 * (plan.k_blocks + plan.v_blocks);
#pragma unroll 1
        for (int i = threadIdx.x; i < p.n_regions * per_region; i += n_wide_threads) {
            const int r = i / per_region;
            const int j = i - r * per_region;
            const bool is_k = j < 4 * plan.k_blocks;
            const int at = is_k ? 4 * k_first + j : 4 * v_first + j - 4 * plan.k_blocks;
            const int all = 4 * (is_k ? p.k_blocks : p.v_blocks);
            const RegionArgs& region = p.regions[r];
            const Chunk* const from =
                region.chunks + (is_k ? item.k_group * 4 * p.k_blocks
                                      : p.n_kv / p.k_group * 4 * p.k_blocks + item.v_group * 4 * p.v_blocks);
            Chunk chunk = at < all ? from[at] : Chunk{};
            if constexpr (Pair) {
                const GroupTable group = is_k ? region.k_groups[item.k_group] : region.v_groups[item.v_group];
                const uint32_t row_bytes = is_k ? region.k_row_bytes : region.v_row_bytes;
                if (wide_halves(group, from, all) && at < all) {
                    const int begin = 4 * (is_k ? k_first : v_first);
                    const WideHalf half(group, row_bytes, from, begin, begin + 4 * (is_k ? k_blocks : v_blocks));
                    chunk.codes = static_cast<uint16_t>(chunk.codes - from[begin].codes + half.lead);
                    chunk.affine = static_cast<uint16_t>(half.affine);
                }
            }
            chunks[i] = chunk;
        }
        if (static_cast<int>(threadIdx.x) < 2 * p.n_regions) {
            const int r = threadIdx.x / 2;
            const bool is_k = threadIdx.x % 2 == 0;
            const RegionArgs& region = p.regions[r];
            WideSource from;
            from.group = is_k ? region.k_groups[item.k_group] : region.v_groups[item.v_group];
            from.row_bytes = is_k ? region.k_row_bytes : region.v_row_bytes;
            from.rows = is_k ? region.k_rows : region.v_rows;
            from.seq = region.seq;
            from.pos = region.pos;
            from.n_slots = p.n_slots[r];
            from.tiles_before = parts.tiles_before(r);
            from.whole = copied_whole(from.row_bytes, from.group) ? 1 : 0;
            // each region's own: the largest, by which tiles are laid out, need be no multiple of 16
            from.pitch =
                from.whole != 0 ? static_cast<int>(from.row_bytes) : pitch_of(static_cast<int>(from.group.bytes));
            from.affine = from.affine_from = from.lead = 0;
            if constexpr (Pair) {
                const Chunk* const of = region.chunks + from.group.chunks;
                const int begin = 4 * (is_k ? k_first : v_first);
                if (wide_halves(from.group, of, 4 * (is_k ? p.k_blocks : p.v_blocks))) {
                    const WideHalf half(from.group, from.row_bytes, of, begin,
                                        begin + 4 * (is_k ? k_blocks : v_blocks));
                    from.affine_from = static_cast<int>(from.group.first) + of[0].affine;
                    from.group.first = half.first;
                    from.group.bytes = half.bytes;
                    from.group.access_bits = 4;
                    from.whole = 0;
                    from.pitch = half.pitch;
                    from.affine = half.affine;
                    from.lead = half.lead;
                }
            }
            sources[threadIdx.x] = from;
        }
    }
    if (static_cast<int>(threadIdx.x) < 2 * p.stages) Arrivals(&arrivals[threadIdx.x % 2][threadIdx.x / 2]).init();
    if constexpr (Pair) {
        if (threadIdx.x < 2) Arrivals(&scores_arrive[threadIdx.x]).init();
        pair_barrier();
    } else {
        __syncthreads();
    }
    wait_for_previous();
    if (static_cast<int>(threadIdx.x) < R) {
        const bool exists = first_row + static_cast<int>(threadIdx.x) < item.n_rows;
        const int at = exists ? item.row_at(p, first_row + static_cast<int>(threadIdx.x)) : 0;
        const int token = at / p.n_head;
        rows[threadIdx.x] = {
            exists ? 1ull << p.q_seq[token] : 0, exists ? p.q_pos[token] : -1,
            exists && p.alibi_slopes != nullptr ? p.alibi_slopes[at - token * p.n_head] * log2_e : 0.0f};
    }

    const int stage_bits = p.stages - 1;  // one stage or two
    const int k_warps = p.k_columns / 16;
    const auto find_region = [&](int i) {
        const int t = tile_begin + i;
        int r = 0;
        if (p.n_regions > 1) r += t >= sources[2].tiles_before ? 1 : 0;
        if (p.n_regions > 2) r += t >= sources[4].tiles_before ? 1 : 0;
        return r;
    };
    // of the last four tiles whose K was issued, two bits each
    uint32_t regions = 0;
    const auto region_of = [&](int i) { return static_cast<int>(regions >> 2 * (i & 3) & 3); };
    // K and the marks of tile i of this part, or its V
    const auto issue = [&](int side, int i) {
        if (i >= 0 && i < n_tiles) {
            if (side == 0) {
                regions = (regions & ~(3u << 2 * (i & 3))) | static_cast<uint32_t>(find_region(i)) << 2 * (i & 3);
            }
            const WideSource& from = sources[2 * region_of(i) + side];
            const int first = (tile_begin + i - from.tiles_before) * tile;
            const int n = min(tile, from.n_slots - first);
            if (side == 0 && static_cast<int>(threadIdx.x) < tile) {
                uint64_t* const seq = seq_of(i, tile);
                auto* const pos = reinterpret_cast<int32_t*>(seq + tile);
                const int s = threadIdx.x;
                if (s < n) {
                    copy_async<8>(seq + s, from.seq + first + s);
                    copy_async<4>(pos + s, from.pos + first + s);
                } else {
                    seq[s] = 0;
                    pos[s] = 0;
                }
            }
            const int stage = i & stage_bits;
            const int pitch = from.pitch;
            uint8_t* const to = shared + (side == 0 ? plan.k_stages + stage * tile * p.k_pitch
                                                    : plan.v_stages + stage * tile * p.v_pitch);
            const GroupTable& group = from.group;
            const bool bulk = has_bulk_copies && (from.whole != 0 || (group.access_bits == 4 && group.bytes > 0));
            const Arrivals rows_arrive(&arrivals[side][stage]);
            // V is fetched by the warps that do not multiply K meanwhile, if there are such: the copy engine makes them wait
            const int issuers = side == 0 || k_warps == n_wide_warps ? n_wide_warps : n_wide_warps - k_warps;
            const int issuer = warp - (n_wide_warps - issuers);
            if (!bulk) {
                if (threadIdx.x == 0) rows_arrive.announce(0);
                if (from.whole != 0) {
                    copy_whole_rows<n_wide_threads>(threadIdx.x, to, from.rows + static_cast<int64_t>(first) * pitch,
                                                    n * pitch);
                } else {
                    copy_rows<n_wide_threads>(threadIdx.x, to, pitch, from.rows, from.row_bytes, group, first, n);
                }
            } else if (from.whole != 0) {
                // a piece a warp; the last bytes are no 16
                const int all = n * pitch;
                const uint8_t* const src = from.rows + static_cast<int64_t>(first) * pitch;
                const int piece = round_up((tile * pitch + issuers - 1) / issuers, 16);
                const int begin = issuer * piece;
                const int bytes = min(all / 16 * 16, begin + piece) - begin;
                if (threadIdx.x == 0) rows_arrive.announce(all / 16 * 16);
                if (lane == 0 && issuer >= 0 && bytes > 0) rows_arrive.copy(to + begin, src + begin, bytes);
                const int last = all / 16 * 16 + 4 * static_cast<int>(threadIdx.x);
                if (last < all) copy_async<4>(to + last, src + last);
            } else {
                const int bytes = static_cast<int>(group.bytes);
                const bool codes = Pair && from.affine != 0;
                const int all = codes ? bytes + half_slack : bytes;
                // behind the last row there may be nothing: it ends with single words
                const bool to_the_end = codes && first + n == from.n_slots;
                const auto lead_of = [&](int s) {
                    return codes ? static_cast<int>((s * from.row_bytes + group.first) % 16) : 0;
                };
                const auto in_sixteens = [&](int s) { return (lead_of(s) + bytes) / 16 * 16; };
                if (threadIdx.x == 0) {
                    rows_arrive.announce(n * all - (to_the_end ? all - in_sixteens(n - 1) : 0));
                }
                const int s = lane * issuers + issuer;
                if (issuer >= 0 && s < n) {
                    const uint8_t* const row = from.rows + static_cast<int64_t>(first + s) * from.row_bytes;
                    const bool last = to_the_end && s == n - 1;
                    uint8_t* const dst = to + s * pitch + from.lead - lead_of(s);
                    const uint8_t* const src = row + group.first - lead_of(s);
                    rows_arrive.copy(dst, src, last ? in_sixteens(s) : all);
                    if (codes) {
                        copy_async<4>(to + s * pitch + from.affine, row + from.affine_from);
                        if (last) {
                            for (int at = in_sixteens(s); at < lead_of(s) + bytes; at += 4) {
                                copy_async<4>(dst + at, src + at);
                            }
                        }
                    }
                }
            }
        }
        copies_commit();
    };
    // queries [row][channel] f32 -> operand b of the products, two blocks of 8 rows in a 16-byte word: lane 4g + c holds row g,
    // channels of pair s and s + 4 of chunk c; as stored: channels 2c, 2c + 1, 2c + 8, 2c + 9 of chunk s
    const auto fill_queries = [&] {
    // neighbouring threads read neighbouring channels of one row
#pragma unroll 4
        for (int i = threadIdx.x; i < plan.k_blocks * 8 * R; i += n_wide_threads) {
            const int half = i % 2;  // channels 4·half … 4·half + 3 and 8 + those of a chunk
            const int chunk = i / 2 % 4;
            const int row = i / 8 % R;
            const int b = i / 8 / R;
            const float* const from = first_row + row < item.n_rows
                                          ? p.q + static_cast<int64_t>(item.row_at(p, first_row + row)) * p.q_width
                                          : nullptr;
            const int channel = 64 * (k_first + b) + 16 * chunk + 4 * half;
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

    // whose softmax this thread shares
    constexpr int row_threads = n_wide_threads / R;
    constexpr int steps =
        (Pair ? pair_tile : max_wide_tile) / (2 * row_threads);  // two neighbouring slots a thread and step
    const int my_row = threadIdx.x / row_threads;
    const int my_part = threadIdx.x % row_threads;
    float row_max = -INFINITY;
    float row_sum = 0.0f;

    // warps side by side over the slots; the others share channels
    const int slot_bits = __ffs(tile) - 5;
    const int k_slot = (warp & ((1 << slot_bits) - 1)) * 16;
    const int k_channel = warp >> slot_bits;
    const int k_side = p.k_columns >> (slot_bits + 4);
    const int v_side = wide_channel_warps(plan.v_blocks);
    const int v_channel = warp & (v_side - 1);
    const int v_slot = warp >> (__ffs(v_side) - 1);
    const int v_slots = n_wide_warps >> (__ffs(v_side) - 1);
    float acc[NB][4][NT][4] = {};
    const int plane_pitch = tile + WidePlan::plane_pad(Pair);
    const int weight_pitch = tile + 8;
    auto* const planes = reinterpret_cast<float*>(shared + plan.planes);
    auto* const exchange = reinterpret_cast<float2*>(shared + plan.exchange) + threadIdx.x;
    const auto weights_of = [&](int i) {
        return reinterpret_cast<__half*>(shared + plan.weights) + (i & 1) * R * weight_pitch;
    };
    const auto scales_of = [&](int i) { return reinterpret_cast<float*>(shared + plan.scales) + (i & 1) * R; };

    int moved = 0;  // whether a row's maximum has
    // K of tile i, then V of tile i - 1: between two barriers warps are at different work
#pragma unroll 1
    for (int i = -p.stages; i <= n_tiles; i++) {
        const bool has_k = i >= 0 && i < n_tiles;
        const Chunk* const k_chunks = chunks + (has_k ? region_of(i) : 0) * 4 * (plan.k_blocks + plan.v_blocks);
        if (has_k) {
            const WideSource& source = sources[2 * region_of(i)];
            const int pitch = source.pitch;
            [[maybe_unused]] const int k_kind = source.group.kind;
            const int stage = i & stage_bits;
            const uint8_t* const k_rows = shared + plan.k_stages + stage * tile * p.k_pitch + k_slot * pitch;
            Arrivals(&arrivals[0][stage]).wait(i >> stage_bits & 1);
            if (k_channel < k_side) {
                float sum[NT][4] = {};
#pragma unroll 1
                for (int b = k_channel; b < k_blocks; b += k_side) {
                    uint32_t a[4][4];
                    if constexpr (as_stored) {
#pragma unroll
                        for (int s = 0; s < 4; s++) load_a(a[s], k_rows + k_chunks[4 * b + s].codes, pitch, lane);
                    } else {
                        uint32_t x[8];
                        uint32_t y[8];
                        const uint8_t* const upper = k_rows + g * pitch;
                        with_group_kind<Kind>(k_kind, [&](auto kind) __attribute__((always_inline)) {
                            two_slots<decltype(kind)::value>(upper, upper + 8 * pitch, k_chunks[4 * b + c], x, y);
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
                float* const to = planes + (k_channel * R + 2 * c) * plane_pitch + k_slot + g;
#pragma unroll
                for (int n = 0; n < NT; n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) to[(8 * n + e % 2) * plane_pitch + e / 2 * 8] = sum[n][e];
                }
            }
        }
        int holes = 0;
        if (i >= 0) {
            copies_wait(2 * p.stages - 2);  // V of tile i - 1
            holes = __syncthreads_or(i > 0 && static_cast<int>(threadIdx.x) < tile &&
                                     seq_of(i - 1, tile)[threadIdx.x] == 0);
        }
        float2 score[steps];
#pragma unroll
        for (int k = 0; k < steps; k++) score[k] = make_float2(0.0f, 0.0f);
        if (has_k) {
            const float* const score_of = planes + my_row * plane_pitch + 2 * my_part;
#pragma unroll(Pair ? 4 : 2)
            for (int w = 0; w < k_side; w++) {
#pragma unroll
                for (int k = 0; k < steps; k++) {
                    // of a small tile some threads read beyond their row, for nothing
                    if (k > 0 && 2 * k * row_threads >= tile) break;
                    const float2 x =
                        *reinterpret_cast<const float2*>(score_of + w * R * plane_pitch + 2 * k * row_threads);
                    score[k].x += x.x;
                    score[k].y += x.y;
                }
            }
            if constexpr (Pair) {
                // room for two tiles: the other has read tile i - 2 where its scores of tile i - 1 have come
                if (threadIdx.x == 0) Arrivals(&scores_arrive[i & 1]).announce(tile * R * 4);
#pragma unroll
                for (int k = 0; k < steps; k++) {
                    if (2 * (my_part + k * row_threads) >= tile) break;
                    send(in_peer(exchange + (2 * k + (i & 1)) * n_wide_threads), score[k],
                         in_peer(&scores_arrive[i & 1]));
                }
            }
        }
        issue(0, i + p.stages);
        float rescale = 1.0f;
        const auto softmax = [&] {
            const uint64_t* const seq = seq_of(i, tile);
            const auto* const pos = reinterpret_cast<const int32_t*>(seq + tile);
            const WideRow row = rows[my_row];
            const float scale = p.scale * log2_e;
            float tile_max = -INFINITY;
#pragma unroll
            for (int k = 0; k < steps; k++) {
                const int s = 2 * (my_part + k * row_threads);
                if (s >= tile) break;
                const auto of = *reinterpret_cast<const ulonglong2*>(seq + s);
                const int2 at = *reinterpret_cast<const int2*>(pos + s);
                const auto masked = [&](float x, uint64_t slot_seq, int slot_pos) {
                    const int distance = row.pos - slot_pos;
                    const bool seen =
                        (slot_seq & row.seq) != 0 && distance >= 0 && (p.window == 0 || distance < p.window);
                    return seen ? x * scale - row.slope * static_cast<float>(distance) : -INFINITY;
                };
                score[k].x = masked(score[k].x, of.x, at.x);
                score[k].y = masked(score[k].y, of.y, at.y);
                tile_max = fmaxf(tile_max, fmaxf(score[k].x, score[k].y));
            }
#pragma unroll
            for (int o = row_threads / 2; o > 0; o /= 2) {
                tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, o));
            }
            const float new_max = tile_max > row_max + stale_max ? tile_max : row_max;
            const float base = new_max == -INFINITY ? 0.0f : new_max;
            if (new_max != row_max) rescale = exp2f(row_max - base);
            row_sum *= rescale;
            row_max = new_max;
            if (my_part == 0) scales_of(i)[my_row] = rescale;
            __half* const weights = weights_of(i) + my_row * weight_pitch;
#pragma unroll
            for (int k = 0; k < steps; k++) {
                const int s = 2 * (my_part + k * row_threads);
                if (s >= tile) break;
                const __half2 w = __floats2half2_rn(exp2f(score[k].x - base), exp2f(score[k].y - base));
                // as the lanes hold a product's slots: 4c … 4c + 3 of 16 in lane c, as stored 2c, 2c + 1, 2c + 8, 2c + 9
                const int to = as_stored ? s : s / 16 * 16 + s / 2 % 2 * 8 + s / 4 % 4 * 2;
                *reinterpret_cast<__half2*>(weights + to) = w;
                const float2 as_used = __half22float2(w);  // the weights as the product sees them
                row_sum += as_used.x + as_used.y;
            }
        };
        if constexpr (!Pair) {
            if (has_k) softmax();
        }

        if (i > 0) {
            const int region = region_of(i - 1);
            const WideSource& source = sources[2 * region + 1];
            const int pitch = source.pitch;
            [[maybe_unused]] const int v_kind = source.group.kind;
            const Chunk* const v_chunks = chunks + region * 4 * (plan.k_blocks + plan.v_blocks) + 4 * plan.k_blocks;
            const int stage = (i - 1) & stage_bits;
            uint8_t* const v_rows = shared + plan.v_stages + stage * tile * p.v_pitch;
            Arrivals(&arrivals[1][stage]).wait((i - 1) >> stage_bits & 1);
            if (holes != 0) {
                // free slots hold anything, NaN too: zero bytes decode to finite values in every format
                const uint64_t* const seq = seq_of(i - 1, tile);
                for (int s = warp; s < tile; s += n_wide_warps) {
                    if (seq[s] != 0) continue;
                    for (int k = lane; k < pitch / 4; k += 32) {
                        reinterpret_cast<uint32_t*>(v_rows + s * pitch)[k] = 0;
                    }
                }
                before_async_access();
                __syncthreads();
            }
            const float* const scales = scales_of(i - 1);
            const __half* const weights = weights_of(i - 1);
            if (moved != 0) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float2 by = *reinterpret_cast<const float2*>(scales + 8 * n + 2 * c);
#pragma unroll
                    for (int b = 0; b < NB; b++) {
#pragma unroll
                        for (int j = 0; j < 4; j++) {
#pragma unroll
                            for (int e = 0; e < 4; e++) acc[b][j][n][e] *= e % 2 == 0 ? by.x : by.y;
                        }
                    }
                }
            }
#pragma unroll 1
            for (int k16 = v_slot; k16 < tile / 16; k16 += v_slots) {
                uint32_t w[NT / 2][4];  // of two blocks of 8 rows: slots of the first and the second half
#pragma unroll
                for (int n = 0; n < NT / 2; n++) {
                    load_b_pair(w[n], weights + 16 * n * weight_pitch + 16 * k16, 2 * weight_pitch, lane);
                }
                const uint8_t* const slot = v_rows + (16 * k16 + (as_stored ? 0 : 4 * c)) * pitch;
#pragma unroll
                for (int n = 0; n < NB; n++) {
                    const int b = v_channel + v_side * n;
                    if (b < v_blocks) {
                        uint32_t a[4][4];
                        if constexpr (as_stored) {
#pragma unroll
                            for (int j = 0; j < 4; j++) {
                                load_a_transposed(a[j], slot + v_chunks[4 * b + j].codes, pitch, lane);
                            }
                        } else {
                            uint32_t first[8];
                            uint32_t second[8];
                            with_group_kind<Kind>(v_kind, [&](auto kind) __attribute__((always_inline)) {
                                four_slots<decltype(kind)::value, 2>(slot, pitch, v_chunks[4 * b + g / 2], g % 2, first,
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
        if constexpr (Pair) {
            if (has_k) {
                Arrivals(&scores_arrive[i & 1]).wait(i >> 1 & 1);
#pragma unroll
                for (int k = 0; k < steps; k++) {
                    if (k > 0 && 2 * k * row_threads >= tile) break;
                    const float2 x = exchange[(2 * k + (i & 1)) * n_wide_threads];
                    score[k].x += x.x;
                    score[k].y += x.y;
                }
                softmax();
            }
        }
        if (i >= 0) {
            copies_wait(2 * p.stages - 2);              // K of tile i + 1
            moved = __syncthreads_or(rescale != 1.0f);  // rarely, once a few tiles have passed
        }
        issue(1, i - 1 + p.stages);
        if (i == -1) {
            // while the first tiles are under way
            fill_queries();
            copies_wait(2 * p.stages - 1);
            __syncthreads();
        }
    }

    // every thread of a row holds its own part of the sum
#pragma unroll
    for (int o = row_threads / 2; o > 0; o /= 2) row_sum += __shfl_xor_sync(0xffffffffu, row_sum, o);

    // warps that took other slots of the same channels add theirs
    auto* const merged =
        reinterpret_cast<float*>(shared + plan.k_stages);  // [R][64·v_blocks + 4], channels as the products leave them
    const int width = 64 * v_blocks;
    const int merged_pitch = width + 4;
#pragma unroll 1
    for (int turn = 0; turn < v_slots; turn++) {
        if (v_slot == turn) {
#pragma unroll
            for (int n = 0; n < NB; n++) {
                const int b = v_channel + v_side * n;
                if (b < v_blocks) {
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

    if (first_row + my_row >= item.n_rows) return;
    const int out_row = item.row_at(p, first_row + my_row);
    const float* const from = merged + my_row * merged_pitch;
    // row g of a block's tile i: as stored channel 8i + g, else chunk g/2, half g%2 and of it pair i/2, second if i is odd
    const auto channels_at = [&](int d) {
        if constexpr (as_stored) return *reinterpret_cast<const float4*>(from + d);
        const float* const at = from + d / 64 * 64 + d / 8 % 2 * 32 + d / 16 % 4 * 2 + d / 4 % 2;
        return make_float4(at[0], at[16], at[8], at[24]);
    };
    if (!Pair && only_part && p.v_b == nullptr) {
        const float inverse = row_sum > 0.0f ? 1.0f / row_sum : 0.0f;
#pragma unroll 1
        for (int d = 4 * my_part; d < p.head_dim; d += 4 * row_threads) {
            const float4 x = channels_at(d);
            *reinterpret_cast<float4*>(p.out + int64_t{out_row} * p.head_dim + d) =
                make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
        }
    } else {
        const int64_t at = static_cast<int64_t>(split) * p.n_tokens * p.n_head + out_row;
        if (my_part == 0 && rank == 0) reinterpret_cast<float2*>(p.partial_ml)[at] = make_float2(row_max, row_sum);
#pragma unroll 2
        for (int d = 4 * my_part; d < width; d += 4 * row_threads) {
            *reinterpret_cast<float4*>(p.partial + 64 * (at * p.v_blocks + v_first) + d) = channels_at(d);
        }
    }
}

}  // namespace lkv::cuda
