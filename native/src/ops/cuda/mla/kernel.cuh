// One thread block: a part of the slots, up to 32 query rows of the heads that share a latent, all of its channels.
//
//   scores     a warp takes 16 slots and a share of K's channels: latents are decoded into operand a, queries are operand b
//   softmax    a warp takes rows of the tile's scores, adds up the shares, makes weights
//   sums       a warp takes a share of V's channels and all of the tile's slots: latents are operand a, weights are operand b
//
// with a barrier behind each. K of the next tile is copied during softmax and sums, V of the next one during scores. Where scores are
// there, V of the next tile is copied beside this one's.
// A latent is decoded once a thread block and goes from the registers into the product.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/gpu/chain.cuh"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/mla/tiles.cuh"
#include "ops/cuda/mla/units.cuh"
#include "ops/cuda/softmax/halve.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// One side of one region, in shared memory.
struct MlaSide {
    const uint8_t* rows;  // slot 0, from the group's first byte
    uint32_t row_bytes;
    uint32_t bytes;     // of the group
    uint32_t lead;      // of the group's first byte behind a multiple of 16
    int32_t pitch;      // of a staged tile; 0: rows are read where they lie
    int32_t pieces;     // 16 bytes each, of a row wherever it starts
    int32_t step_rows;  // rows of as many pieces as there are threads
    int32_t n_units;
};

struct MlaRegion {
    MlaSide k, v;
    const int32_t* pos;
    const uint64_t* seq;
    int32_t n_slots;
    int32_t most_steps;  // of a tile
    int32_t first_step;
    int32_t end_step;
    int32_t key_row;  // of slot 0, in a chunk of keys
};

struct MlaRow {
    uint64_t seq;  // bit; 0: no query
    int32_t pos;
    int32_t at;  // of [n_tokens, n_head]
    float slope;
    int32_t head;  // KV head, of the item's
};

// Positions and sequences of a tile's slots.
struct MlaMarks {
    uint64_t seq[most_tile];
    int32_t pos[most_tile];
};

struct MlaShared {
    MlaRegion regions[max_regions];
    MlaRow rows[32];
    MlaMarks marks[2];
    float scales[32];                 // of sums before this tile
    float before[32];                 // what a row's mean counts for that the chunks before left
    uint32_t tokens[most_tile / 32];  // bit s of a word: a slot that holds a token
};

// A tile of one region: 32, 64 or 128 slots, of which the last may be none of this part.
struct MlaTile {
    const MlaRegion* region;
    int r;
    int first;  // slot
    int slots;
    int valid;  // slots in use
    int next;   // step behind it

    // step: its first one; end: of the part
    __device__ MlaTile(const MlaShared& own, const MlaSteps& steps, int step, int end) : r(steps.region_of(step)) {
        region = &own.regions[r];
        next = min(min(end, region->end_step), step + region->most_steps);
        first = (step - region->first_step) * step_slots;
        slots = next - step > 2 ? 128 : (next - step) * step_slots;
        valid = min((next - step) * step_slots, region->n_slots - first);
    }
};

// Row s of a staged tile begins at lead(tile) + s · pitch, which is where it begins in memory, modulo 16.
__device__ inline uint32_t staged_lead(const MlaSide& side, const MlaTile& tile) {
    return (side.lead + static_cast<uint32_t>(tile.first) * side.row_bytes) % 16;
}

__device__ inline void copy_rows(uint8_t* stage, const MlaSide& side, const MlaTile& tile) {
    const int pitch = side.pitch;
    if (pitch == 0) return;
    const auto row_bytes = static_cast<int>(side.row_bytes);
    const auto lead = static_cast<int>(staged_lead(side, tile));
    const uint8_t* from = side.rows + static_cast<int64_t>(tile.first) * row_bytes - lead;
    if (pitch == row_bytes) {  // as in memory
        const int end = lead + tile.valid * row_bytes;
        for (int at = 16 * static_cast<int>(threadIdx.x); at < end; at += 16 * mla_threads)
            copy_async<16>(stage + at, from + at);
        return;
    }
    // rows are as far from a multiple of 16 in the tile as in memory
    const int bytes = static_cast<int>(side.bytes);
    const int pieces = side.pieces;
    const int step_rows = side.step_rows;
    const int step_pieces = mla_threads - step_rows * pieces;
    int row = small_quotient(static_cast<int>(threadIdx.x), pieces);
    int piece = static_cast<int>(threadIdx.x) - row * pieces;
    while (row < tile.valid) {
        const int begin = lead + row * row_bytes;
        const int at = (begin & ~15) + 16 * piece;
        if (at < begin + bytes) copy_async<16>(stage + at + row * (pitch - row_bytes), from + at);
        row += step_rows;
        piece += step_pieces;
        if (piece >= pieces) {
            piece -= pieces;
            row++;
        }
    }
}

__device__ inline void copy_marks(MlaMarks& marks, const MlaTile& tile) {
    const int s = static_cast<int>(threadIdx.x);
    if (s >= tile.valid) return;
    copy_async<4>(&marks.pos[s], tile.region->pos + tile.first + s);
    copy_async<8>(&marks.seq[s], tile.region->seq + tile.first + s);
}

// Where a row's weight of a slot lies, in halves: as operand b of sums, a lane's words of two blocks of eight rows side by side.
template <int NT>
__device__ inline int weight_at(int slot, int row) {
    const int within = slot % 16;
    const int lane = row % 8 * 4 + within % 8 / 2;
    const int word = within / 8 * 2 + within % 2;
    if constexpr (NT == 1) return (slot / 16 * 32 + lane) * 4 + word;
    return (((slot / 16 * (NT / 2) + row / 16) * 32 + lane) * 2 + row / 8 % 2) * 4 + word;
}

template <int NT>
__device__ __forceinline__ void load_weights(uint32_t (&w)[NT][2], const __half* weights, int k16, int lane) {
    if constexpr (NT == 1) {
        const uint2 x = reinterpret_cast<const uint2*>(weights)[k16 * 32 + lane];
        w[0][0] = x.x;
        w[0][1] = x.y;
    } else {
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            const uint4 x = reinterpret_cast<const uint4*>(weights)[(k16 * (NT / 2) + n) * 32 + lane];
            w[2 * n][0] = x.x;
            w[2 * n][1] = x.y;
            w[2 * n + 1][0] = x.z;
            w[2 * n + 1][1] = x.w;
        }
    }
}

// The thread block's query rows as operand b of scores: lane 4n + t has of row n the four pairs of channels that KeyReader names.
template <int NT>
__device__ void load_queries(const AttnArgs& p, const MlaShared& own, uint4* queries) {
    const int n = p.mla.k_units * NT * 32;
#pragma unroll 6
    for (int i = static_cast<int>(threadIdx.x); i < n; i += mla_threads) {
        const int row = i / 32 % NT * 8 + i % 32 / 4;
        const int channel = i / (32 * NT) * unit_channels + 8 * (i % 4);  // q_width is a multiple of 8
        const int at = own.rows[row].at;
        // of expanded keys a row has the units of its own head
        const int first = p.mla.keys.as == MlaK::latents ? 0 : own.rows[row].head * p.q_width;
        const bool exists = at >= 0 && channel >= first && channel < first + p.q_width;
        const auto* const from = reinterpret_cast<const float4*>(
            p.q + (exists ? static_cast<int64_t>(at) * p.q_width + channel - first : 0));
        float4 x[2] = {from[0], from[1]};
        if (!exists) x[0] = x[1] = float4{};
        queries[i] = make_uint4(bits(__floats2half2_rn(x[0].x, x[0].z)), bits(__floats2half2_rn(x[0].y, x[0].w)),
                                bits(__floats2half2_rn(x[1].x, x[1].z)), bits(__floats2half2_rn(x[1].y, x[1].w)));
    }
}

// scores[NT][4] += units begin … end - 1, which are of one kind. rows: of the lane's slots g and g + 8
template <int NT, int Bits>
__device__ __forceinline__ void score_units(float (&scores)[NT][4], const uint8_t* const (&rows)[2],
                                            const MlaUnit* units, int begin, int end, const uint4* queries, int lane) {
    const KeyReader<Bits> reader(lane);
    constexpr int unit_bytes = 4 * Bits;
    uint32_t affine[2] = {};
    const uint8_t* at[2] = {};
    int segment_end = begin;
    const uint4* query = queries + begin * NT * 32 + lane;
#pragma unroll 1
    for (int u = begin; u < end; u++) {
        if (u == segment_end) {
            const MlaUnit unit = units[u];
            segment_end = unit.end;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if constexpr (Bits < 16) affine[i] = u32_at<true>(rows[i] + unit.affine);
                at[i] = rows[i] + unit.codes;
            }
        }
        uint32_t words[2][KeyReader<Bits>::n_words];
#pragma unroll
        for (int i = 0; i < 2; i++) reader.load(at[i], words[i]);
        uint32_t x[4];
        uint32_t y[4];
        reader.decode(words[0], affine[0], x);
        reader.decode(words[1], affine[1], y);
        const uint32_t first[4] = {x[0], y[0], x[1], y[1]};
        const uint32_t second[4] = {x[2], y[2], x[3], y[3]};
        uint4 q[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) q[n] = query[n * 32];
#pragma unroll
        for (int n = 0; n < NT; n++) mma(scores[n], first, q[n].x, q[n].y);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(scores[n], second, q[n].z, q[n].w);
        at[0] += unit_bytes;
        at[1] += unit_bytes;
        query += NT * 32;
    }
}

// The same of expanded keys of f16, by heads: blocks of eight query rows that have none of a head's are left out.
template <int NT>
__device__ __forceinline__ void score_heads(float (&scores)[NT][4], const uint8_t* const (&rows)[2], int begin, int end,
                                            int head_units, const MlaShared& own, const uint4* queries, int lane) {
    constexpr int at_once = 2;  // units under way together
    const KeyReader<16> reader(lane);
    const int my_head = lane < 8 * NT ? own.rows[lane].head : -1;
    int head = -1;
    uint32_t has = 0;  // query rows of this head
    uint32_t words[at_once][2][4];
    const auto load = [&](int u, uint32_t (&to)[2][4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) reader.load(rows[i] + 2 * unit_channels * min(u, end - 1), to[i]);
    };
#pragma unroll
    for (int k = 0; k < at_once; k++) load(begin + k, words[k]);
#pragma unroll 1
    for (int u0 = begin; u0 < end; u0 += at_once) {
#pragma unroll
        for (int k = 0; k < at_once; k++) {
            const int u = u0 + k;
            if (u >= end) break;
            uint32_t x[4];
            uint32_t y[4];
            reader.decode(words[k][0], 0, x);
            reader.decode(words[k][1], 0, y);
            load(u + at_once, words[k]);
            const int of = small_quotient(u, head_units);
            if (of != head) {
                head = of;
                has = __ballot_sync(0xffffffffu, my_head == of);
            }
            const uint32_t first[4] = {x[0], y[0], x[1], y[1]};
            const uint32_t second[4] = {x[2], y[2], x[3], y[3]};
#pragma unroll
            for (int n = 0; n < NT; n++) {
                if ((has >> 8 * n & 0xffu) == 0) continue;
                const uint4 q = queries[(u * NT + n) * 32 + lane];
                mma(scores[n], first, q.x, q.y);
                mma(scores[n], second, q.z, q.w);
            }
        }
    }
}

// Of one warp: its slots and share of K's channels.
template <int NT, MlaK K>
__device__ __forceinline__ void score_tile(const AttnArgs& p, const MlaShared& own, const MlaTile& tile,
                                           const uint8_t* stage, const MlaUnit* units, const uint4* queries,
                                           float* all_scores, int warp, int lane) {
    const MlaSide& side = tile.region->k;
    const int slot_warps_bits = __ffs(tile.slots / key_slots) - 1;
    const int share = warp >> slot_warps_bits;
    const int shares_bits = mla_warp_bits - slot_warps_bits;
    const int first_slot = (warp & ((1 << slot_warps_bits) - 1)) * key_slots;
    if (first_slot >= tile.valid) return;
    const int n_units = K == MlaK::rows ? p.mla.k_units : side.n_units;
    const int end = (share + 1) * n_units >> shares_bits;
    const int g = lane / 4;
    float scores[NT][4] = {};
    int u = share * n_units >> shares_bits;
    const uint8_t* rows[2];
    if (K == MlaK::rows || side.pitch == 0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int s = min(first_slot + g + 8 * i, tile.valid - 1);
            rows[i] = side.rows + static_cast<int64_t>(tile.first + s) * side.row_bytes;
        }
        if constexpr (K == MlaK::rows) {
            if (u < end) score_heads<NT>(scores, rows, u, end, p.head_dim / unit_channels, own, queries, lane);
        } else {
            score_units<NT, 16>(scores, rows, units, u, end, queries, lane);
        }
    } else if constexpr (K == MlaK::latents) {
        rows[0] = stage + staged_lead(side, tile) + (first_slot + g) * side.pitch;
        rows[1] = rows[0] + 8 * side.pitch;
#pragma unroll 1
        while (u < end) {
            const MlaUnit unit = units[u];
            const int until = min(end, static_cast<int>(unit.kind_end));
            with_bits(unit.kind, [&](auto bits) __attribute__((always_inline)) {
                score_units<NT, decltype(bits)::value>(scores, rows, units, u, until, queries, lane);
            });
            u = until;
        }
    }
    float* const to = all_scores + 2 * (lane % 4) * score_pitch + key_slots * warp + g;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) to[(8 * n + e % 2) * score_pitch + e / 2 * 8] = scores[n][e];
    }
}

// A row's maximum (base 2) and sum of weights, this lane's share of it.
struct MlaState {
    float top = -INFINITY;
    float sum = 0.0f;
};

// Rows of weights that a warp makes; of eight rows there is one for every second warp.
template <int NT>
constexpr int warp_rows = NT == 1 ? 1 : NT / 2;

// A warp's rows of scores: a lane has every 32nd slot.
template <int NT>
using RowScores = float[warp_rows<NT>][most_tile / 32];

// Of a tile of 32·Steps slots, whose shares are added up.
template <int NT, int Steps>
__device__ __forceinline__ void load_scores(RowScores<NT>& x, const float* scores, int warp, int lane) {
    constexpr int shares = key_slots * mla_warps / (32 * Steps);
#pragma unroll
    for (int k = 0; k < warp_rows<NT>; k++) {
        const float* const from = scores + min(warp * warp_rows<NT> + k, 8 * NT - 1) * score_pitch + lane;
#pragma unroll
        for (int j = 0; j < Steps; j++) {
            float sum = from[32 * j];
#pragma unroll
            for (int share = 1; share < shares; share++) sum += from[32 * (share * Steps + j)];
            x[k][j] = sum;
        }
    }
}

// Those that another kernel left (MlaK::scores).
template <int NT>
__device__ __forceinline__ void fetch_scores(RowScores<NT>& x, const AttnArgs& p, const MlaShared& own,
                                             const MlaTile& tile, int warp, int lane) {
#pragma unroll
    for (int k = 0; k < warp_rows<NT>; k++) {
        const int at = own.rows[min(warp * warp_rows<NT> + k, 8 * NT - 1)].at;
        const float* const from = p.mla.keys.scores + static_cast<int64_t>(max(at, 0)) * p.mla.keys.chunk_slots +
                                  tile.region->key_row + tile.first + lane;
#pragma unroll
        for (int j = 0; j < most_tile / 32; j++) {
            x[k][j] = at >= 0 && 32 * j + lane < tile.valid ? __ldcg(from + 32 * j) : 0.0f;
        }
    }
}

// Scores of a warp's rows to weights, of a tile of 32·Steps slots. Sets the factors of sums so far and marks slots that hold tokens.
// Returns bit 0: a factor is not 1, bit 1: there are slots without a token.
template <int NT, int Steps>
__device__ __forceinline__ int make_weights(const AttnArgs& p, MlaShared& own, const MlaMarks& marks,
                                            const MlaTile& tile, RowScores<NT>& x, __half* weights,
                                            MlaState (&state)[warp_rows<NT>], int warp, int lane) {
    constexpr float log2_e = 1.4426950408889634f;
    constexpr int rows = warp_rows<NT>;
    uint64_t seq[Steps];
    int32_t pos[Steps];
    bool holes = tile.valid % 16 != 0;
#pragma unroll
    for (int j = 0; j < Steps; j++) {
        const bool used = 32 * j + lane < tile.valid;
        seq[j] = used ? marks.seq[32 * j + lane] : 0;
        pos[j] = used ? marks.pos[32 * j + lane] : -1;
        holes = holes || __any_sync(0xffffffffu, used && seq[j] == 0);
    }
    if (warp == mla_warps - 1) {
#pragma unroll
        for (int j = 0; j < Steps; j++) {
            const uint32_t tokens = __ballot_sync(0xffffffffu, seq[j] != 0);
            if (lane == 0) own.tokens[j] = tokens;
        }
    }
    const int first = warp * rows;
    if (first >= 8 * NT) return holes ? 2 : 0;
    const float scale = p.scale * log2_e;
    const uint32_t window = p.window == 0 ? 0x80000000u : static_cast<uint32_t>(p.window);
    bool moved = false;
#pragma unroll
    for (int k = 0; k < rows; k++) {
        const MlaRow& of = own.rows[first + k];
        const int32_t query_pos = of.pos;
        const uint64_t query_seq = of.seq;
        const float slope = of.slope;
        float top = -INFINITY;
#pragma unroll
        for (int j = 0; j < Steps; j++) {
            const int32_t behind = query_pos - pos[j];  // as unsigned: later tokens are behind any window
            const bool visible = ((seq[j] & query_seq) != 0) & (pos[j] >= 0) & (static_cast<uint32_t>(behind) < window);
            const float score = x[k][j] * scale - slope * static_cast<float>(behind);
            x[k][j] = visible ? score : -INFINITY;
            top = fmaxf(top, x[k][j]);
        }
        top = warp_max(top);
        MlaState& now = state[k];
        const bool moves = top > now.top + stale_max || (now.top == -INFINITY && top != -INFINITY);
        const float factor = moves ? power_of_two(now.top - top) : 1.0f;
        now.top = moves ? top : now.top;
        now.sum *= factor;
        moved = moved || moves;
        if (lane == 0) own.scales[first + k] = factor;
    }
#pragma unroll
    for (int k = 0; k < rows; k++) {
        const float base = state[k].top == -INFINITY ? 0.0f : state[k].top;
        __half* const to = weights + weight_at<NT>(lane, first + k);
#pragma unroll
        for (int j = 0; j < Steps; j++) {
            const __half weight = __float2half_rn(power_of_two(x[k][j] - base));
            state[k].sum += __half2float(weight);
            to[256 * NT * j] = weight;
        }
    }
    return (moved ? 1 : 0) | (holes ? 2 : 0);
}

// A lane's sums of a unit of V: channels 4g … 4g + 3 as [two][·][two], rows 8n + 2t and the next one.
template <int NT>
using UnitSums = float[2][NT][4];

// sums[0 … N - 1] += units of one segment, of all slots of a tile.
template <int NT, int Bits, int N, int U>
__device__ __forceinline__ void sum_units(UnitSums<NT> (&sums)[U], int first, const uint8_t* rows, int pitch,
                                          MlaUnit unit, const __half* weights, int n16, const uint32_t* tokens,
                                          int lane) {
    const ValueReader<Bits> reader(lane);
    constexpr int unit_bytes = 4 * Bits;
    const int t = lane % 4;
    const uint8_t* at = rows + 2 * t * pitch + unit.codes + reader.place();
    const int affine = unit.affine - unit.codes - reader.place();
#pragma unroll 1
    for (int k16 = 0; k16 < n16; k16++) {
        uint32_t w[NT][2];
        load_weights<NT>(w, weights, k16, lane);
        uint32_t of[4] = {};  // scale and minimum of slots 2t, 2t + 1, 2t + 8, 2t + 9
        uint32_t words[4][N][ValueReader<Bits>::n_words];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint8_t* const slot = at + (i % 2 + i / 2 * 8) * pitch;
            if constexpr (Bits < 16) of[i] = u32_at<true>(slot + affine);
            const bool holds = Bits < 16 || (tokens[k16 / 2] >> (k16 % 2 * 16 + 2 * t + i % 2 + i / 2 * 8) & 1) != 0;
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (holds) {
                    reader.load(slot + n * unit_bytes, words[i][n]);
                } else {
#pragma unroll
                    for (uint32_t& word : words[i][n]) word = 0;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            uint32_t x[4];
            uint32_t y[4];
            reader.decode(words[0][n], words[1][n], of[0], of[1], x);
            reader.decode(words[2][n], words[3][n], of[2], of[3], y);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const uint32_t a[4] = {x[2 * m], x[2 * m + 1], y[2 * m], y[2 * m + 1]};
#pragma unroll
                for (int i = 0; i < NT; i++) mma(sums[first + n][m][i], a, w[i][0], w[i][1]);
            }
        }
        at += 16 * pitch;
    }
}

// Of one warp: its units of V, all slots.
template <int NT, int U>
__device__ __forceinline__ void sum_tile(UnitSums<NT> (&sums)[U], const MlaTile& tile, const uint8_t* stage,
                                         const MlaUnit* units, const __half* weights, const uint32_t* tokens, int warp,
                                         int lane) {
    const MlaSide& side = tile.region->v;
    const int n16 = (tile.valid + 15) / 16;
    const auto sum = [&](auto n, int first, MlaUnit unit) __attribute__((always_inline)) {
        constexpr int N = decltype(n)::value;
        if (side.pitch == 0) {
            const uint8_t* const rows = side.rows + static_cast<int64_t>(tile.first) * side.row_bytes;
            return sum_units<NT, 16, N, U>(sums, first, rows, static_cast<int>(side.row_bytes), unit, weights, n16,
                                           tokens, lane);
        }
        const uint8_t* const rows = stage + staged_lead(side, tile);
        with_bits(unit.kind, [&](auto bits) __attribute__((always_inline)) {
            sum_units<NT, decltype(bits)::value, N, U>(sums, first, rows, side.pitch, unit, weights, n16, tokens, lane);
        });
    };
    const int u = warp * U;
    if (u >= side.n_units) return;
    const MlaUnit unit = units[u];
    if constexpr (U == 2) {
        if (u + 1 < static_cast<int>(unit.end)) return sum(std::integral_constant<int, 2>{}, 0, unit);
        if (u + 1 < side.n_units) sum(std::integral_constant<int, 1>{}, 1, units[u + 1]);
    }
    sum(std::integral_constant<int, 1>{}, 0, unit);
}

// Rows that hold no token, and those behind the last slot, may decode to anything, NaN too.
__device__ inline void clear_holes(uint8_t* stage, const MlaTile& tile, const uint32_t* tokens, int warp, int lane) {
    const MlaSide& side = tile.region->v;
    if (side.pitch == 0) return;
    uint8_t* const rows = stage + staged_lead(side, tile);
    for (int s = warp; s < (tile.valid + 15) / 16 * 16; s += mla_warps) {
        if ((tokens[s / 32] >> s % 32 & 1) != 0) continue;
        for (uint32_t k = 4 * static_cast<uint32_t>(lane); k < side.bytes; k += 128) {
            *reinterpret_cast<uint32_t*>(rows + s * side.pitch + k) = 0;
        }
    }
}

// What a thread block knows before an earlier kernel of the step has ended.
__device__ inline void set_up(const AttnArgs& p, const MlaSteps& steps, const MlaSlots& n_slots, MlaShared& own,
                              MlaUnit* units) {
    const WorkItem item(p, static_cast<int>(blockIdx.x));
    const int thread = static_cast<int>(threadIdx.x);
    const int row = thread - (mla_threads - 32);
    if (row >= 0 && row < p.mla.rows) {
        constexpr float log2_e = 1.4426950408889634f;
        const int of_item = static_cast<int>(blockIdx.y) * p.mla.rows + row;
        const bool exists = of_item < item.n_rows;
        const int at = exists ? item.few_row_at(p, of_item) : 0;
        const int token = small_quotient(at, p.n_head);
        own.rows[row] = {exists ? 1ull << p.q_seq[token] : 0, exists ? p.q_pos[token] : -1, exists ? at : -1,
                         exists && p.alibi_slopes != nullptr ? p.alibi_slopes[at - token * p.n_head] * log2_e : 0.0f,
                         exists ? item.few_head(of_item) : -1};
    }
    const int warp = thread / 32;
    if (warp >= 2 * p.n_regions) return;
    const int r = warp / 2;
    const bool is_k = warp % 2 == 0;
    const RegionArgs& region = p.regions[r];
    const GroupTable group = is_k ? region.k_groups[item.k_group] : region.v_groups[item.v_group];
    const int n =
        note_units(region.chunks + group.chunks, 4 * (is_k ? p.k_blocks : p.v_blocks), units + warp * most_units);
    if (thread % 32 != 0) return;
    MlaRegion& to = own.regions[r];
    MlaSide& side = is_k ? to.k : to.v;
    side.rows = (is_k ? region.k_rows : region.v_rows) + group.first;
    side.row_bytes = is_k ? region.k_row_bytes : region.v_row_bytes;
    side.bytes = group.bytes;
    side.lead = group.first % 16;
    side.n_units = n;
    side.pitch = n > 0 && units[warp * most_units].kind == kind_f16_wide
                     ? 0
                     : mla_pitch(group.bytes, group.first, side.row_bytes);
    side.pieces = static_cast<int>(side.bytes + 30) / 16;
    side.step_rows = small_quotient(mla_threads, side.pieces);
    const auto of_region = [&](const int32_t (&x)[max_regions]) { return r == 0 ? x[0] : (r == 1 ? x[1] : x[2]); };
    const int first = of_region(n_slots.first);
    if (is_k && p.mla.keys.as == MlaK::scores) {
        side.pitch = 0;
    } else if (is_k && p.mla.keys.as == MlaK::rows) {
        side.row_bytes = static_cast<uint32_t>(p.n_kv * p.head_dim * 2);
        side.rows = p.mla.keys.rows + static_cast<int64_t>(of_region(n_slots.key_row)) * side.row_bytes +
                    item.head_kv * p.head_dim * 2;
        side.pitch = 0;
    } else {
        side.rows += static_cast<int64_t>(first) * side.row_bytes;
        side.lead = (side.lead + static_cast<uint32_t>(first) * side.row_bytes) % 16;
    }
    if (!is_k) return;
    to.pos = region.pos + first;
    to.seq = region.seq + first;
    to.n_slots = of_region(n_slots.of);
    to.key_row = of_region(n_slots.key_row);
    to.most_steps = (p.mla.small_tiles >> r & 1) != 0 ? 1 : p.mla.tile / step_slots;
    to.first_step = steps.steps_before(r);
    to.end_step = r == 0 ? steps.before_1 : (r == 1 ? steps.before_2 : steps.all);
}

// NT: blocks of eight query rows. U: units of V that a warp sums.
template <int NT, int U, MlaK K>
__global__ void __launch_bounds__(mla_threads, 1)
    mla_kernel(const __grid_constant__ AttnArgs p, const __grid_constant__ MlaLayout layout) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ MlaShared own;
    let_next_start();
    auto* const queries = reinterpret_cast<uint4*>(shared);
    auto* const scores = reinterpret_cast<float*>(shared + layout.queries);
    auto* const weights = reinterpret_cast<__half*>(shared + layout.queries + layout.scores);
    auto* const units = reinterpret_cast<MlaUnit*>(shared + layout.queries + layout.scores + layout.weights);
    uint8_t* const k_stage = shared + layout.queries + layout.scores + layout.weights + layout.units;
    uint8_t* const v_stage = k_stage + layout.k_stage;
    constexpr bool scored = K == MlaK::scores;
    const auto stage_of = [&](int parity) { return scored && parity != 0 ? k_stage : v_stage; };  // of V
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;

    const MlaSlots n_slots(p);
    const MlaSteps steps(p, n_slots);
    const int part = static_cast<int>(blockIdx.z);
    if (part >= steps.count) return;
    const int begin = steps.begin(part);
    const int end = steps.begin(part + 1);
    set_up(p, steps, n_slots, own, units);
    __syncthreads();
    wait_for_previous();
    RowScores<NT> x = {};
    if (begin < end) {
        const MlaTile tile(own, steps, begin, end);
        copy_marks(own.marks[0], tile);
        if constexpr (scored) {
            fetch_scores<NT>(x, p, own, tile, warp, lane);
        } else {
            copy_rows(k_stage, tile.region->k, tile);
        }
        copies_commit();
        copy_rows(v_stage, tile.region->v, tile);
    }
    copies_commit();
    if constexpr (!scored) load_queries<NT>(p, own, queries);
    copies_wait(scored ? 0 : 1);
    __syncthreads();

    UnitSums<NT> sums[U] = {};
    MlaState state[warp_rows<NT>];
#pragma unroll 1
    for (int i = begin, parity = 0; i < end; parity ^= 1) {
        const MlaTile tile(own, steps, i, end);
        i = tile.next;
        const MlaUnit* const of_region = units + tile.r * 2 * most_units;
        if constexpr (!scored) {
            score_tile<NT, K>(p, own, tile, k_stage, of_region, queries, scores, warp, lane);
            __syncthreads();  // scores are there, K has been read
        }

        if (i < end) {
            const MlaTile next(own, steps, i, end);
            copy_marks(own.marks[parity ^ 1], next);
            if constexpr (scored) {
                copy_rows(stage_of(parity ^ 1), next.region->v, next);
            } else {
                copy_rows(k_stage, next.region->k, next);
            }
        }
        copies_commit();
        const auto make = [&](auto steps) __attribute__((always_inline)) {
            constexpr int Steps = decltype(steps)::value;
            if constexpr (!scored) load_scores<NT, Steps>(x, scores, warp, lane);
            return make_weights<NT, Steps>(p, own, own.marks[parity], tile, x, weights, state, warp, lane);
        };
        const int made = tile.slots == 128  ? make(std::integral_constant<int, 4>{})
                         : tile.slots == 64 ? make(std::integral_constant<int, 2>{})
                                            : make(std::integral_constant<int, 1>{});
        const bool holes = (made & 2) != 0;
        if (scored && i < end) fetch_scores<NT>(x, p, own, MlaTile(own, steps, i, end), warp, lane);
        copies_wait(1);                                        // V of this tile
        const bool rescale = __syncthreads_or(made & 1) != 0;  // weights are there
        if (holes) {
            clear_holes(stage_of(parity), tile, own.tokens, warp, lane);
            __syncthreads();
        }
        if (rescale) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const float2 by = *reinterpret_cast<const float2*>(own.scales + 8 * n + 2 * (lane % 4));
#pragma unroll
                for (int u = 0; u < U; u++) {
#pragma unroll
                    for (int e = 0; e < 8; e++) sums[u][e / 4][n][e % 4] *= e % 2 == 0 ? by.x : by.y;
                }
            }
        }
        sum_tile<NT, U>(sums, tile, stage_of(parity), of_region + most_units, weights, own.tokens, warp, lane);
        copies_wait(0);   // K of the next tile, or V
        __syncthreads();  // V has been read
        if (!scored && i < end) {
            const MlaTile next(own, steps, i, end);
            copy_rows(v_stage, next.region->v, next);
        }
        copies_commit();
    }

    // A part's mean of V in f16, a row's maximum and sum of weights: what the parts are merged from.
    const int64_t first_row = static_cast<int64_t>(part) * p.n_tokens * p.n_head;
#pragma unroll
    for (int k = 0; k < warp_rows<NT>; k++) {
        float sum = state[k].sum;
#pragma unroll
        for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
        const int row = warp * warp_rows<NT> + k;
        if (lane != 0 || row >= 8 * NT) continue;
        const int at = own.rows[row].at;
        float top = state[k].top;
        float by = 1.0f;
        float before = 0.0f;  // what this part has of the chunks before
        float2* const ml = reinterpret_cast<float2*>(p.partial_ml) + first_row + max(at, 0);
        if (K != MlaK::latents && p.mla.keys.continues != 0 && at >= 0 && ml->y > 0.0f) {
            const float most = fmaxf(top, ml->x);
            by = power_of_two(top - most);
            before = ml->y * power_of_two(ml->x - most);
            top = most;
        }
        sum = sum > 0.0f ? sum * by : 0.0f;
        const float inverse = sum + before > 0.0f ? 1.0f / (sum + before) : 0.0f;
        own.scales[row] = sum > 0.0f ? by * inverse : 0.0f;
        if constexpr (K != MlaK::latents) own.before[row] = before * inverse;
        if (at >= 0) *ml = make_float2(top, sum + before);
    }
    __syncthreads();
    const int width = 64 * p.v_blocks;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * n + 2 * (lane % 4) + e;
            const int at = own.rows[row].at;
            if (at < 0) continue;
            const float by = own.scales[row];
            __half* const to = reinterpret_cast<__half*>(p.partial) + (first_row + at) * width + 4 * (lane / 4);
#pragma unroll
            for (int u = 0; u < U; u++) {
                const int channel = unit_channels * (warp * U + u);
                if (channel >= width) continue;
                const auto pair = [&](int m) {
                    return bits(__floats2half2_rn(sums[u][m][n][e] * by, sums[u][m][n][e + 2] * by));
                };
                uint2 mean = make_uint2(pair(0), pair(1));
                if constexpr (K != MlaK::latents) {
                    if (own.before[row] > 0.0f) {
                        const uint2 other = *reinterpret_cast<const uint2*>(to + channel);
                        const __half2 share = __float2half2_rn(own.before[row]);
                        mean.x = bits(__hfma2(half2_of(other.x), share, half2_of(mean.x)));
                        mean.y = bits(__hfma2(half2_of(other.y), share, half2_of(mean.y)));
                    }
                }
                *reinterpret_cast<uint2*>(to + channel) = mean;
            }
        }
    }
}

}  // namespace lkv::cuda
