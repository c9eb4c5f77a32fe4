// The stages of the wide kernel: what a thread of a thread block does with a part. All is inlined. Arrays, which lie in registers once loops
// are unrolled, are no members of what has single values: the compiler would keep these in memory until then, and unroll less.
#pragma once

#include "ops/cuda/gpu/bulk_copy.cuh"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/kernels/wide/layout.h"
#include "ops/cuda/rows/copy.cuh"
#include "ops/cuda/rows/dequant.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// What a thread block works at: tiles [begin, begin + n) of the slots, a part of the sequence, for the query rows from `own_row` on.
struct WideShare {
    int tile;  // slots
    int begin;
    int n_tiles;
    int own_row;  // the first of them in WideShared
};

// Where a row's sums go, null where there is no row, and by what they are multiplied.
struct alignas(16) RowEnd {
    float* to;
    float scale;
};

// The kernel's own shared memory.
struct WideShared {
    QueryRow rows[max_wide_rows];
    int32_t row_at[max_wide_rows];          // of [n_tokens, n_head], -1 where there is no row
    uint64_t arrivals[2][max_wide_stages];  // of K and V rows that the copy engine brings
    int32_t part;                           // of `parts` that have work
    int32_t parts;
};

// How many bits lie below the one that is set. x: a power of two.
__device__ inline int bits_of(int x) { return __ffs(x) - 1; }

// The maximum (base 2) of the row whose softmax a thread shares, and its share of the sum of weights.
struct WideState {
    float top = -INFINITY;
    float sum = 0.0f;
};

template <int NT, int NB, int Kind>
struct WidePart {
    static constexpr int R = 8 * NT;
    static constexpr bool as_stored = Kind == kind_f16_wide;  // channels and slots in their order, by matrix loads
    static constexpr int row_threads = n_wide_threads / R;
    static constexpr int steps = max_wide_tile / (2 * row_threads);  // two neighbouring slots a thread and step

    const WideArgs& p;
    const WideLayout& plan;
    const WideShare& share;
    uint8_t* const shared;
    WideShared& own;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const int tile = share.tile;
    const int tile_begin = share.begin;
    const int n_tiles = share.n_tiles;
    const int k_blocks = p.k_blocks;
    const int v_blocks = p.v_blocks;
    const WideSource* const sources = reinterpret_cast<const WideSource*>(shared);  // [n_regions][K, V]
    const Chunk* const chunks = reinterpret_cast<const Chunk*>(shared + plan.chunks);
    uint2* const queries = reinterpret_cast<uint2*>(shared + plan.queries);  // [k_blocks][4][NT/2][32][2]
    const int n_items = p.k_blocks * 8 * R;
    const int stage_bits = p.stages - 1;  // one stage or two
    const int k_warps = p.k_columns / 16;
    uint32_t regions = 0;  // of the last four tiles whose K was issued, two bits each
    // whose softmax this thread shares
    const int my_row = threadIdx.x / row_threads;
    const int my_part = threadIdx.x % row_threads;
    // warps side by side over the slots; the others share channels
    const int slot_bits = bits_of(tile) - 4;
    const int k_slot = (warp & ((1 << slot_bits) - 1)) * 16;
    const int k_channel = warp >> slot_bits;
    const int k_side = p.k_columns >> (slot_bits + 4);
    const int v_side = wide_channel_warps(p.v_blocks);
    const int v_channel = warp & (v_side - 1);
    const int v_slot = warp >> bits_of(v_side);
    const int v_slots = n_wide_warps >> bits_of(v_side);
    const int plane_pitch = tile + WideLayout::plane_pad;
    const int weight_pitch = tile + 8;
    float* const planes = reinterpret_cast<float*>(shared + plan.planes);

    using Sums = float[NB][4][NT][4];

    __device__ __forceinline__ uint64_t* seq_of(int i) const {
        return reinterpret_cast<uint64_t*>(shared + plan.marks + (i & (wide_marks - 1)) * tile * 12);
    }
    __device__ __forceinline__ __half* weights_of(int i) const {
        return reinterpret_cast<__half*>(shared + plan.weights) + (i & 1) * R * weight_pitch;
    }
    __device__ __forceinline__ float* scales_of(int i) const {
        return reinterpret_cast<float*>(shared + plan.scales) + (i & 1) * R;
    }

    // queries [row][channel] f32 -> operand b of the products, two blocks of 8 rows in a 16-byte word: lane 4g + c holds row g,
    // channels of pair s and s + 4 of chunk c; as stored: channels 2c, 2c + 1, 2c + 8, 2c + 9 of chunk s.
    // Item i: neighbouring threads read neighbouring channels of one row, 4·half … 4·half + 3 and 8 + those of a chunk.
    struct Channels {
        float4 x, y;
    };
    __device__ __forceinline__ Channels read_query(int i) const {
        const int at = i < n_items ? own.row_at[share.own_row + i / 8 % R] : -1;
        const float* const from = at >= 0 ? p.q + static_cast<int64_t>(at) * p.q_width : nullptr;
        const int channel = 64 * (i / (8 * R)) + 16 * (i / 2 % 4) + 4 * (i % 2);
        return Channels{four_floats(from, p.q_width, channel), four_floats(from, p.q_width, channel + 8)};
    }
    __device__ __forceinline__ void keep_query(int i, const Channels& of) const {
        const float4& x = of.x;
        const float4& y = of.y;
        const int half = i % 2;
        const int chunk = i / 2 % 4;
        const int row = i / 8 % R;
        const auto word = [&](float a, float b) { return bits(__floats2half2_rn(a, b)); };
        const auto to = [&](int s, int at) -> uint2& {
            const int b = i / (8 * R);
            return queries[(((b * 4 + s) * (NT / 2) + row / 16) * 32 + row % 8 * 4 + at) * 2 + row / 8 % 2];
        };
        if (i >= n_items) return;
        if constexpr (as_stored) {
            to(chunk, 2 * half) = make_uint2(word(x.x, x.y), word(y.x, y.y));
            to(chunk, 2 * half + 1) = make_uint2(word(x.z, x.w), word(y.z, y.w));
        } else {
            to(2 * half, chunk) = make_uint2(word(x.x, x.z), word(y.x, y.z));
            to(2 * half + 1, chunk) = make_uint2(word(x.y, x.w), word(y.y, y.w));
        }
    }

    __device__ __forceinline__ int find_region(int i) const {
        const int t = tile_begin + i;
        int r = 0;
        if (p.n_regions > 1) r += t >= sources[2].tiles_before ? 1 : 0;
        if (p.n_regions > 2) r += t >= sources[4].tiles_before ? 1 : 0;
        return r;
    }
    __device__ __forceinline__ int region_of(int i) const { return static_cast<int>(regions >> 2 * (i & 3) & 3); }
    // K and the marks of tile i of this part, or its V.
    __device__ __forceinline__ void issue(int side, int i) {
        if (i >= 0 && i < n_tiles) {
            if (side == 0) {
                regions = (regions & ~(3u << 2 * (i & 3))) | static_cast<uint32_t>(find_region(i)) << 2 * (i & 3);
            }
            const WideSource& from = sources[2 * region_of(i) + side];
            const int first = (tile_begin + i - from.tiles_before) * tile;
            const int n = min(tile, from.n_slots - first);
            const uint8_t* const rows = from.rows + row_offset(first, from.page, from.row_bytes);
            if (side == 0 && static_cast<int>(threadIdx.x) < tile) {
                uint64_t* const seq = seq_of(i);
                copy_mark(seq, reinterpret_cast<int32_t*>(seq + tile), from.seq + first, from.pos + first,
                          static_cast<int>(threadIdx.x), n);
            }
            const int stage = i & stage_bits;
            const int pitch = from.pitch;
            uint8_t* const to = shared + (side == 0 ? plan.k_stages + stage * tile * p.k_pitch
                                                    : plan.v_stages + stage * tile * p.v_pitch);
            const GroupTable& group = from.group;
            const bool bulk = has_bulk_copies && (from.whole != 0 || (group.access_bits == 4 && group.bytes > 0));
            const Arrivals rows_arrive(&own.arrivals[side][stage]);
            // V is fetched by the warps that do not multiply K meanwhile, if there are such: the copy engine makes them wait
            const int issuers = side == 0 || k_warps == n_wide_warps ? n_wide_warps : n_wide_warps - k_warps;
            const int issuer = warp - (n_wide_warps - issuers);
            if (!bulk) {
                if (threadIdx.x == 0) rows_arrive.announce(0);
                if (from.whole != 0) {
                    copy_whole_rows<n_wide_threads>(threadIdx.x, to, rows, n * pitch);
                } else {
                    copy_rows<n_wide_threads>(threadIdx.x, to, pitch, rows, from.row_bytes, group, n);
                }
            } else if (from.whole != 0) {
                // a piece a warp; the last bytes are no 16
                const int all = n * pitch;
                const int piece = round_up((tile * pitch + issuers - 1) / issuers, 16);
                const int begin = issuer * piece;
                const int bytes = min(all / 16 * 16, begin + piece) - begin;
                if (threadIdx.x == 0) rows_arrive.announce(all / 16 * 16);
                if (lane == 0 && issuer >= 0 && bytes > 0) rows_arrive.copy(to + begin, rows + begin, bytes);
                const int last = all / 16 * 16 + 4 * static_cast<int>(threadIdx.x);
                if (last < all) copy_async<4>(to + last, rows + last);
            } else {
                const int bytes = static_cast<int>(group.bytes);
                if (threadIdx.x == 0) rows_arrive.announce(n * bytes);
                const int s = lane * issuers + issuer;
                if (issuer >= 0 && s < n) {
                    const uint8_t* const row = rows + static_cast<int64_t>(s) * from.row_bytes;
                    rows_arrive.copy(to + s * pitch, row + group.first, bytes);
                }
            }
        }
        copies_commit();
    }

    // Queries, which are on their way while the first rows are asked for: K of tile 0, then K of the next and V of the one before in turn,
    // as in the loop of walk(); rolled, since it runs once.
    __device__ __forceinline__ void start() {
        constexpr int ahead = 2;
        Channels first_queries[ahead];
#pragma unroll
        for (int k = 0; k < ahead; k++) {
            first_queries[k] = read_query(static_cast<int>(threadIdx.x) + k * n_wide_threads);
        }
#pragma unroll 1
        for (int k = 0; k < 2 * p.stages; k++) issue(k % 2, k / 2 - k % 2);
#pragma unroll
        for (int k = 0; k < ahead; k++) {
            keep_query(static_cast<int>(threadIdx.x) + k * n_wide_threads, first_queries[k]);
        }
#pragma unroll 1
        for (int at = threadIdx.x + ahead * n_wide_threads; at < n_items; at += ahead * n_wide_threads) {
            Channels next[ahead];
#pragma unroll
            for (int k = 0; k < ahead; k++) next[k] = read_query(at + k * n_wide_threads);
#pragma unroll
            for (int k = 0; k < ahead; k++) keep_query(at + k * n_wide_threads, next[k]);
        }
        copies_wait(2 * p.stages - 1);
        __syncthreads();
    }

    // Partial scores of tile i: this warp's slots and its share of K's channels.
    __device__ __forceinline__ void score(int i) const {
        const Chunk* const k_chunks = chunks + region_of(i) * 4 * (p.k_blocks + p.v_blocks);
        const WideSource& source = sources[2 * region_of(i)];
        const int pitch = source.pitch;
        [[maybe_unused]] const int k_kind = source.group.kind;
        const int stage = i & stage_bits;
        const uint8_t* const k_rows = shared + plan.k_stages + stage * tile * p.k_pitch + k_slot * pitch;
        Arrivals(&own.arrivals[0][stage]).wait(i >> stage_bits & 1);
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
    // Those of the slots and the row that this thread takes, added up.
    __device__ __forceinline__ void add_scores(float2 (&score)[steps]) const {
        const float* const score_of = planes + my_row * plane_pitch + 2 * my_part;
#pragma unroll(NT == 2 ? 4 : 2)
        for (int w = 0; w < k_side; w++) {
#pragma unroll
            for (int k = 0; k < steps; k++) {
                // of a small tile some threads read beyond their row, for nothing
                if (k > 0 && 2 * k * row_threads >= tile) break;
                const float2 x = *reinterpret_cast<const float2*>(score_of + w * R * plane_pitch + 2 * k * row_threads);
                score[k].x += x.x;
                score[k].y += x.y;
            }
        }
    }

    // Scores of tile i to weights; returns by what the row's sums so far are to be multiplied.
    __device__ __forceinline__ float make_weights(int i, float2 (&score)[steps], WideState& state) const {
        float rescale = 1.0f;
        const uint64_t* const seq = seq_of(i);
        const auto* const pos = reinterpret_cast<const int32_t*>(seq + tile);
        const QueryRow row = own.rows[share.own_row + my_row];
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
                const bool seen = (slot_seq & row.seq) != 0 && distance >= 0 && (p.window == 0 || distance < p.window);
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
        const float new_max = tile_max > state.top + stale_max ? tile_max : state.top;
        const float base = new_max == -INFINITY ? 0.0f : new_max;
        if (new_max != state.top) rescale = exp2f(state.top - base);
        state.sum *= rescale;
        state.top = new_max;
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
            state.sum += as_used.x + as_used.y;
        }
        return rescale;
    }

    // V of tile i - 1, times its weights. moved: whether a row's maximum has.
    __device__ __forceinline__ void add_values(int i, bool holes, bool moved, Sums& acc) const {
        const int region = region_of(i - 1);
        const WideSource& source = sources[2 * region + 1];
        const int pitch = source.pitch;
        [[maybe_unused]] const int v_kind = source.group.kind;
        const Chunk* const v_chunks = chunks + region * 4 * (p.k_blocks + p.v_blocks) + 4 * p.k_blocks;
        const int stage = (i - 1) & stage_bits;
        uint8_t* const v_rows = shared + plan.v_stages + stage * tile * p.v_pitch;
        Arrivals(&own.arrivals[1][stage]).wait((i - 1) >> stage_bits & 1);
        if (holes) {
            // free slots hold anything, NaN too: zero bytes decode to finite values in every format
            const uint64_t* const seq = seq_of(i - 1);
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
        if (moved && i > 1) {  // sums of the first tile are still to come
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

    // K of tile i, then V of tile i - 1: between two barriers warps are at different work.
    __device__ __forceinline__ void walk(WideState& state, Sums& acc) {
        int moved = 0;
#pragma unroll 1
        for (int i = 0; i <= n_tiles; i++) {
            const bool has_k = i < n_tiles;
            if (has_k) score(i);
            copies_wait(2 * p.stages - 2);  // V of tile i - 1
            const int holes =
                __syncthreads_or(i > 0 && static_cast<int>(threadIdx.x) < tile && seq_of(i - 1)[threadIdx.x] == 0);
            float2 sums[steps];
#pragma unroll
            for (int k = 0; k < steps; k++) sums[k] = make_float2(0.0f, 0.0f);
            if (has_k) add_scores(sums);
            issue(0, i + p.stages);
            float rescale = 1.0f;
            if (has_k) rescale = make_weights(i, sums, state);
            if (i > 0) add_values(i, holes != 0, moved != 0, acc);
            copies_wait(2 * p.stages - 2);              // K of tile i + 1
            moved = __syncthreads_or(rescale != 1.0f);  // rarely, once a few tiles have passed
            issue(1, i - 1 + p.stages);
        }
    }

    // Sums to results, or to a part.
    __device__ __forceinline__ void leave(WideState& state, const Sums& acc) const {
        // every thread of a row holds its own part of the sum
#pragma unroll
        for (int o = row_threads / 2; o > 0; o /= 2) state.sum += __shfl_xor_sync(0xffffffffu, state.sum, o);

        const bool is_result = p.v_b == nullptr && own.parts == 1 && p.leaves != Leaves::parts;
        auto* const ends = reinterpret_cast<RowEnd*>(shared + plan.queries);  // [R], queries are read no more
        if (my_part == 0) {
            RowEnd end{nullptr, 1.0f};
            const int row = own.row_at[share.own_row + my_row];
            if (row >= 0 && is_result) {
                end = {p.out + static_cast<int64_t>(row) * p.head_dim, state.sum > 0.0f ? 1.0f / state.sum : 0.0f};
            } else if (row >= 0) {
                const int64_t at = static_cast<int64_t>(own.part) * p.n_tokens * p.n_head + row;
                reinterpret_cast<float2*>(p.partial_ml)[at] = make_float2(state.top, state.sum);
                end.to = p.partial + 64 * at * p.v_blocks;
            }
            ends[my_row] = end;
        }
        const int width = is_result ? p.head_dim : 64 * v_blocks;

        // A thread's sums are of 2·NT rows and, of each, eight channels of a block, row g of the products' tiles i = 0 … 7: as stored
        // channel 8i + g, else chunk g/2, half g%2 and of it pair i/2, second if i is odd.
        constexpr int n_own = 2 * NT;
        const auto sums_of = [&](int n, int row, int half) __attribute__((always_inline)) {
            const auto at = [&](int i) { return acc[n][i / 2][row / 2][i % 2 * 2 + row % 2]; };
            return as_stored ? make_float4(at(4 * half), at(4 * half + 1), at(4 * half + 2), at(4 * half + 3))
                             : make_float4(at(4 * half), at(4 * half + 2), at(4 * half + 1), at(4 * half + 3));
        };
        // Warps that took other slots of the same channels share out the rows: each adds up its own. (In turns in one place, read and
        // written again, this took 2.5 us of a short cache's 12.)
        auto* const others = reinterpret_cast<float4*>(shared + plan.k_stages);  // [v_slots - 1][n_own][v_side][2][32]
        const int rows_each = max(1, n_own / v_slots);
        const auto other = [&](int source, int row, int half) -> float4& {
            return others[(((source * n_own + row) * v_side + v_channel) * 2 + half) * 32 + lane];
        };
        const auto owner_of = [&](int row) { return row / rows_each; };
        if constexpr (NB == 1) {
#pragma unroll
            for (int row = 0; row < n_own; row++) {
                if (owner_of(row) == v_slot) continue;
                const int source = v_slot - (v_slot > owner_of(row) ? 1 : 0);
                other(source, row, 0) = sums_of(0, row, 0);
                other(source, row, 1) = sums_of(0, row, 1);
            }
        }
        __syncthreads();
#pragma unroll
        for (int row = 0; row < n_own; row++) {
            if (owner_of(row) != v_slot) continue;
            const RowEnd end = ends[row / 2 * 8 + 2 * c + row % 2];
            if (end.to == nullptr) continue;
#pragma unroll
            for (int n = 0; n < NB; n++) {
                const int b = v_channel + v_side * n;
                float4 sum[2] = {sums_of(n, row, 0), sums_of(n, row, 1)};
                if constexpr (NB == 1) {
#pragma unroll 1
                    for (int source = 0; source < v_slots - 1; source++) {
                        add_share(sum[0], 1.0f, other(source, row, 0));
                        add_share(sum[1], 1.0f, other(source, row, 1));
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float4 x = make_float4(sum[half].x * end.scale, sum[half].y * end.scale,
                                                 sum[half].z * end.scale, sum[half].w * end.scale);
                    if constexpr (as_stored) {
                        const int d = 64 * b + 32 * half + g;
                        if (d < width) end.to[d] = x.x;
                        if (d + 8 < width) end.to[d + 8] = x.y;
                        if (d + 16 < width) end.to[d + 16] = x.z;
                        if (d + 24 < width) end.to[d + 24] = x.w;
                    } else {
                        const int d = 64 * b + g / 2 * 16 + 8 * half + g % 2 * 4;
                        if (d < width) *reinterpret_cast<float4*>(end.to + d) = x;
                    }
                }
            }
        }
    }
};

template <int NT, int NB, int Kind>
__device__ __forceinline__ void attend_part(const WideArgs& p, const WideLayout& plan, const WideShare& share,
                                            uint8_t* shared, WideShared& own) {
    WidePart<NT, NB, Kind> part{p, plan, share, shared, own};
    WideState state;
    float acc[NB][4][NT][4] = {};
    part.start();
    part.walk(state, acc);
    part.leave(state, acc);
}

}  // namespace lkv::cuda
