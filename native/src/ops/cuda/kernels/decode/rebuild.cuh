// Scores of a rebuilt K, few query rows, one KV head: every warp rebuilds the keys of its own slots by mma.sync.
#pragma once

#include <climits>

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/kernels/decode/rebuild_tables.cuh"
#include "ops/cuda/rows/copy.cuh"

namespace lkv::cuda {

struct WarpRebuild : RebuildTables {
    uint8_t* factor;  // B of the item's KV head
    uint2* turned;    // [n_tiles][32] this warp's queries, turned back by turned_to positions
    int turned_to = INT_MAX;

    // at: B, then the tables; own: this warp's memory
    __device__ WarpRebuild(uint8_t* at, const DecodeLayout& plan, uint8_t* own)
        : RebuildTables(at + plan.factor, plan.tables, plan.plane_tiles),
          factor(at),
          turned(reinterpret_cast<uint2*>(own)) {}

    // Everything but the queries; the copies are one group of this thread's.
    // factor: uint4 [k_blocks][n_tiles][4][32]: pack_k_b's words of a tile's first eight dimensions, then its second
    __device__ void fill(const Problem& p, const uint32_t* by_plane, int head_kv) const {
        const int words = p.k_blocks * 2 * n_tiles * 4 * 32;
        const auto* const from = reinterpret_cast<const uint2*>(by_plane) + static_cast<int64_t>(head_kv) * words;
        auto* const to = reinterpret_cast<uint2*>(factor);
        for (int i = threadIdx.x; i < words; i += static_cast<int>(blockDim.x)) {
            copy_async<8>(to + (i / 256 * 128 + i % 128) * 2 + i / 128 % 2, from + i);
        }
        copies_commit();
        RebuildTables::fill(p, head_kv, threadIdx.x, blockDim.x);
    }
    // The queries turned back by `base` positions. A lane reads and writes its own.
    __device__ void turn(const Problem& p, int base) {
        turned_to = base;
        const int lane = threadIdx.x % 32;
        for (int j0 = 0; j0 < n_tiles; j0 += 4) {
            const float2 mine = query_angle(p, 8 * j0 + lane, base);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j0 + j < n_tiles) turned[(j0 + j) * 32 + lane] = turned_queries(j0 + j, mine, 8 * j);
            }
        }
    }

    // s[m]: slots 16m + g and 16m + g + 8 for query rows 2c and 2c + 1, as mma leaves them. z: operand a of the latents.
    template <int KB, int MT>
    __device__ void score(const Problem& p, const uint32_t (&z)[KB][MT][4][4], const uint64_t* seq, const int32_t* pos,
                          float (&s)[MT][4]) {
        // slots in the order of their positions, as almost always, are within one span; others take several passes
        const int lane = threadIdx.x % 32;
        const int g = lane / 4;
        const bool used = lane < 16 * MT && seq[lane % (16 * MT)] != 0;
        const int mine = pos[lane % (16 * MT)];
        int lowest = __reduce_min_sync(0xffffffffu, used ? mine : INT_MAX);
        const int highest = __reduce_max_sync(0xffffffffu, used ? mine : -1);
        while (lowest <= highest) {
            if (lowest < turned_to || highest - turned_to >= angle_span) turn(p, lowest);
            int delta[MT][2];
            bool within[MT][2];
#pragma unroll
            for (int m = 0; m < MT; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int past = pos[16 * m + g + 8 * h] - turned_to;
                    delta[m][h] = min(max(past, 0), angle_span - 1);
                    within[m][h] = past == delta[m][h];
                }
            }
            float part[MT][4];
            pass<KB, MT>(p, z, delta, part);
#pragma unroll
            for (int m = 0; m < MT; m++) {
#pragma unroll
                for (int e = 0; e < 4; e++) s[m][e] = within[m][e / 2] ? part[m][e] : s[m][e];
            }
            lowest = __reduce_min_sync(0xffffffffu, used && mine - turned_to >= angle_span ? mine : INT_MAX);
        }
    }

private:
    // delta: how far past the queries' turn these slots are
    template <int KB, int MT>
    __device__ void pass(const Problem& p, const uint32_t (&z)[KB][MT][4][4], const int (&delta)[MT][2],
                         float (&scores)[MT][4]) const {
        const int lane = threadIdx.x % 32;
        float power[MT][2] = {};
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int e = 0; e < 4; e++) scores[m][e] = 0.0f;
        }
#pragma unroll 1
        for (int j = 0; j < n_tiles; j++) {
            // what the turn needs is on its way during the products
            const uint2 q = turned[j * 32 + lane];
            uint2 angle[MT][2];
#pragma unroll
            for (int m = 0; m < MT; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) angle[m][h] = angles_at(delta[m][h], j, lane);
            }
            // two sums each where the chain of products is long
            constexpr int sums = KB > 1 ? 2 : 1;
            float x[sums * MT][4] = {};
            float y[sums * MT][4] = {};
#pragma unroll
            for (int b = 0; b < KB; b++) {
                if (b > 0 && b >= p.k_blocks) break;
                const uint4* const of = reinterpret_cast<const uint4*>(factor) + (b * n_tiles + j) * 4 * 32 + lane;
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    const uint4 f = of[s * 32];
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        mma(x[s % sums * MT + m], z[b][m][s], f.x, f.y);
                        mma(y[s % sums * MT + m], z[b][m][s], f.z, f.w);
                    }
                }
            }
            if constexpr (sums == 2) {
#pragma unroll
                for (int m = 0; m < MT; m++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        x[m][e] += x[MT + m][e];
                        y[m][e] += y[MT + m][e];
                    }
                }
            }
            if (p.k_extras != 0) {
#pragma unroll
                for (int m = 0; m < MT; m++) apply_extras(p, j, x[m], y[m], power[m]);
            }
#pragma unroll
            for (int m = 0; m < MT; m++) {
                uint32_t a[4];
                turn_keys(x[m], y[m], angle[m], a);
                mma(scores[m], a, q.x, q.y);
            }
        }
        if (p.k_extras != 0) {
#pragma unroll
            for (int m = 0; m < MT; m++) apply_norm(p, power[m], scores[m]);
        }
    }
};

}  // namespace lkv::cuda
