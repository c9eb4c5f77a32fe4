// Scores of a rebuilt K, few query rows, by warps in fours (warpgroup.cuh): the keys of 64 slots at once, 64 dimensions at a time, of
// one KV head after the other where several share their latents, which are then decoded once for all of them. The heads' query
// rows are columns of one tile of scores: a head's product has zeros in the columns of the others.
#pragma once

#include <climits>

#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/rebuild_tables.cuh"
#include "ops/cuda/warpgroup.cuh"

namespace lkv::cuda {

// What the warps of a thread block tell each other, four by four.
struct WarpgroupShared {
    int2 positions[2][n_warps];  // lowest and highest of a warp's slots; two, used in turn
    uint64_t factor_arrives;
};

struct WarpgroupRebuild : RebuildTables {
    WarpgroupShared& shared;
    uint2* turned;  // [n_tiles][32] the warpgroup's queries, turned back by turned_to positions
    int turned_to = INT_MAX;
    int turn_of_shared = 0;

    __device__ WarpgroupRebuild(const AttnArgs& p, uint8_t* at, const DecodePlan& plan, WarpgroupShared& shared)
        : RebuildTables(at, plan, p.unit),
          shared(shared),
          turned(reinterpret_cast<uint2*>(reinterpret_cast<uint8_t*>(angles) + plan.angles +
                                          threadIdx.x / 128 * plan.turned)) {}

    // Everything but the queries. factor: pack_k_b_cores of the item's KV heads
    __device__ void fill(const AttnArgs& p, int head_kv) const {
        if (threadIdx.x == 0) {
            const Arrivals arrivals(&shared.factor_arrives);
            arrivals.init();
            const uint32_t bytes = head_bytes(p);
            arrivals.announce(p.unit * bytes);
            arrivals.copy(factor, reinterpret_cast<const uint8_t*>(p.k_b_cores) + static_cast<int64_t>(head_kv) * bytes,
                          p.unit * bytes);
        }
        RebuildTables::fill(p, head_kv, p.unit);
    }
    // Before the first scores, by all threads; a barrier lies between fill and this.
    __device__ void wait(int) const { Arrivals(&shared.factor_arrives).wait(0); }

    // As WarpRebuild::score, of the 64 slots of four warps; seq and pos are this warp's 16. All warps of a warpgroup call it.
    template <int KB, int MT>
    __device__ void score(const AttnArgs& p, const uint32_t (&z)[KB][MT][4][4], const uint64_t* seq, const int32_t* pos,
                          float (&s)[MT][4]) {
        static_assert(MT == 1);
        const int lane = threadIdx.x % 32;
        const int g = lane / 4;
        const bool used = lane < 16 && seq[lane % 16] != 0;
        const int mine = pos[lane % 16];
        int2 range = common(used ? mine : INT_MAX, used ? mine : -1);
        while (range.x <= range.y) {
            // every warp is done with the last turn: it told its positions
            if (range.x < turned_to || range.y - turned_to >= angle_span) turn(p, range.x);
            int delta[2];
            bool within[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int past = pos[g + 8 * h] - turned_to;
                delta[h] = min(max(past, 0), angle_span - 1);
                within[h] = past == delta[h];
            }
            float part[4] = {};
#pragma unroll 1
            for (int head = 0; head < p.unit; head++) pass<KB>(p, z, delta, head, part);
#pragma unroll
            for (int e = 0; e < 4; e++) s[0][e] = within[e / 2] ? part[e] : s[0][e];
            if (range.y - turned_to < angle_span) break;
            range.x = common(used && mine - turned_to >= angle_span ? mine : INT_MAX, -1).x;
        }
    }

private:
    __device__ uint32_t head_bytes(const AttnArgs& p) const {
        return static_cast<uint32_t>(decode_blocks(p) * 64 * 16 * n_tiles * 2);
    }

    // Lowest and highest over four warps.
    __device__ int2 common(int low, int high) {
        const int warp = threadIdx.x / 32;
        low = __reduce_min_sync(0xffffffffu, low);
        high = __reduce_max_sync(0xffffffffu, high);
        int2* const of = shared.positions[turn_of_shared];
        turn_of_shared ^= 1;
        if (threadIdx.x % 32 == 0) of[warp] = make_int2(low, high);
        warpgroup_sync(warp);
        int2 all = of[warp / 4 * 4];
#pragma unroll
        for (int i = 1; i < 4; i++) {
            const int2 other = of[warp / 4 * 4 + i];
            all = make_int2(min(all.x, other.x), max(all.y, other.y));
        }
        return make_int2(__shfl_sync(0xffffffffu, all.x, 0), __shfl_sync(0xffffffffu, all.y, 0));  // uniform registers
    }

    // The queries turned back by `base` positions: two tiles a warp and step.
    __device__ void turn(const AttnArgs& p, int base) {
        turned_to = base;
        const int lane = threadIdx.x % 32;
        const int warp = threadIdx.x / 32;
        for (int j0 = 2 * (warp % 4); j0 < n_tiles; j0 += 8) {
            const float2 mine = query_angle(p, 8 * j0 + lane % 16, base);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                turned[(j0 + j) * 32 + lane] = turned_queries(j0 + j, mine, 8 * j);
            }
        }
        warpgroup_sync(warp);
    }

    // scores += one KV head's. A head's rows are its own columns.
    template <int KB>
    __device__ void pass(const AttnArgs& p, const uint32_t (&z)[KB][1][4][4], const int (&delta)[2], int head,
                         float (&scores)[4]) const {
        constexpr int at_once = 4;  // tiles of 16 dimensions
        const int lane = threadIdx.x % 32;
        const bool mine = lane / 4 / (p.n_head / p.n_kv) % p.unit == head;
        const OperandB b(factor + head * head_bytes(p));
        constexpr int step = 2048 / 16;  // 16 channels of 64 dimensions
        float power[2] = {};
        float sum[4] = {};
#pragma unroll 1
        for (int j0 = 0; j0 < n_tiles; j0 += at_once) {
            float d[8 * at_once];
            warpgroup_begin();
#pragma unroll
            for (int i = 0; i < 4 * KB; i++) {
                warpgroup_mma(d, z[i / 4][0][i % 4], b.at((j0 / at_once * 4 * KB + i) * step), i > 0);
            }
            warpgroup_finish();
#pragma unroll
            for (int j = 0; j < at_once; j++) {
                const uint2 q = turned[(j0 + j) * 32 + lane];
                const uint2 angle[2] = {angles_at(delta[0], j0 + j), angles_at(delta[1], j0 + j)};
                float x[4];
                float y[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    x[e] = d[8 * j + e];
                    y[e] = d[8 * j + 4 + e];
                }
                if (p.k_extras != 0) apply_extras(p, j0 + j, bias + head * 16 * n_tiles, x, y, power);
                uint32_t a[4];
                turn_keys(x, y, angle, a);
                mma(sum, a, mine ? q.x : 0, mine ? q.y : 0);
            }
        }
        if (p.k_extras != 0) apply_norm(p, power, sum);
#pragma unroll
        for (int e = 0; e < 4; e++) scores[e] += sum[e];
    }
};

}  // namespace lkv::cuda
