// Scores of a tile to weights, as operand b of sums: a warp takes rows and adds up the shares of K's channels.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/kernels/mla/block.cuh"
#include "ops/cuda/softmax/halve.cuh"

namespace lkv::cuda {

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

// Loads the scores of a tile of 32·Steps slots, whose shares are added up.
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
__device__ __forceinline__ void fetch_scores(RowScores<NT>& x, const MlaArgs& p, const MlaShared& own,
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
__device__ __forceinline__ int make_weights(const MlaArgs& p, MlaShared& own, int parity, const MlaTile& tile,
                                            RowScores<NT>& x, __half* weights, MlaState (&state)[warp_rows<NT>],
                                            int warp, int lane) {
    constexpr int rows = warp_rows<NT>;
    const MlaMarks& marks = own.marks[parity];
    uint64_t seq[Steps];
    int32_t pos[Steps];
    bool holes = false;
#pragma unroll
    for (int j = 0; j < Steps; j++) {
        const bool used = 32 * j + lane < tile.valid;
        seq[j] = used ? marks.seq[32 * j + lane] : 0;
        pos[j] = used ? marks.pos[32 * j + lane] : -1;
        holes = holes | (used & (seq[j] == 0));
    }
    holes = tile.valid % 16 != 0 || __any_sync(0xffffffffu, holes);
    if (warp == mla_warps - 1) {
#pragma unroll
        for (int j = 0; j < Steps; j++) {
            const uint32_t tokens = __ballot_sync(0xffffffffu, seq[j] != 0);
            if (lane == 0) own.tokens[parity][j] = tokens;
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
        const uint32_t sight = min(window, static_cast<uint32_t>(query_pos) + 1u);
        float top = -INFINITY;
        if (p.alibi_slopes != nullptr) {
            const float slope = of.slope / scale;
#pragma unroll
            for (int j = 0; j < Steps; j++) x[k][j] -= slope * static_cast<float>(query_pos - pos[j]);
        }
#pragma unroll
        for (int j = 0; j < Steps; j++) {
            const int32_t behind = query_pos - pos[j];  // as unsigned: later tokens are out of sight
            const bool visible = ((seq[j] & query_seq) != 0) & (static_cast<uint32_t>(behind) < sight);
            x[k][j] = visible ? x[k][j] * scale : -INFINITY;
            top = fmaxf(top, x[k][j]);
        }
        top = warp_max(top);
        MlaState& now = state[k];
        const bool moves = top > now.top + stale_max || (now.top == -INFINITY && top != -INFINITY);
        const float factor = moves ? power_of_two(now.top - top) : 1.0f;
        now.top = moves ? top : now.top;
        now.sum *= factor;
        moved = moved || moves;
        if (lane == 0) own.scales[parity][first + k] = factor;
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

}  // namespace lkv::cuda
