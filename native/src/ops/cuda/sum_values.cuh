// The specialized kernel's third role: sums [16 channels x 8 queries] += Vᵀ [16 channels x 16 slots] · weights. A warp has one
// 64-channel block of V: of every tile or, where V has fewer blocks than there are warps, of every second or fourth.
#pragma once

#include "ops/cuda/dequant.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/specialized_tiles.cuh"

namespace lkv::cuda {

// Weights of 16 slots are at most 2^stale_max. Those of slots far below the others' maximum become small f16 numbers: up to 2^15
// leaves them the most bits.
constexpr float weight_headroom = 15.0f - stale_max;

// base: what the sums of columns 2c and 2c + 1 are relative to, a power of two. warp: 0 … 3
template <int B, int Kind>
__device__ inline void sum_values(const TileRows<B>& rows, SpecializedBarriers& barriers, const TileWeights* weights,
                                  int warp, float (&sums)[4][4], float (&base)[2]) {
    constexpr int groups = specialized_tile / 16;
    constexpr int apart = tiles_at_once(B);
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const int member = warp % B;
    float column_base = -INFINITY;  // of column g
    float tile_base[groups];        // what weights of column g were relative to, of 16 slots each
    __half2 share[groups];          // 2^(tile_base - column_base)
#pragma unroll
    for (int m = 0; m < groups; m++) {
        tile_base[m] = -INFINITY;
        share[m] = __float2half2_rn(0.0f);
    }
    TileCursor at = rows.cursor(warp / B);
    const auto chunk_of = [&](const TileCursor& of) { return rows.chunks_of(of, 1)[4 * member + g / 2]; };
    const auto slot_of = [c](int m, int r) { return 16 * m + 2 * c + r % 2 + r / 2 * 8; };
    // of the tile at `at`, on their way while its weights are waited for
    StoredChunk<Kind, true> stored[groups][4];
    const auto load_slots = [&](const typename TileRows<B>::Rows& tile, const Chunk& chunk, int m) {
        if constexpr (Kind != any_kind) {
#pragma unroll
            for (int r = 0; r < 4; r++) stored[m][r].load(tile.at, tile.offset(slot_of(m, r)), chunk, g % 2);
        }
    };
    if (at.i < rows.count) {
#pragma unroll
        for (int m = 0; m < groups; m++) load_slots(rows.rows(at, 1), chunk_of(at), m);
    }
#pragma unroll 1
    while (at.i < rows.count) {
        TileCursor then = at;
        rows.step(then, apart);
        if (member == 0) rows.fetch(then, 1);
        const int now = at.i;
        const Turn turn(now, weight_buffer_bits);
        // rows of any kind are loaded and decoded in one
        uint32_t a[Kind == any_kind ? groups : 1][4][4];
        if constexpr (Kind == any_kind) {
            const auto tile = rows.rows(at, 1);
            const Chunk chunk = chunk_of(at);
            with_group_kind<Kind>(rows.group(at, 1).kind, [&](auto kind) __attribute__((always_inline)) {
#pragma unroll
                for (int m = 0; m < groups; m++) {
                    uint32_t first[8];
                    uint32_t second[8];
                    four_rows<decltype(kind)::value>([&](int r) { return tile.row(slot_of(m, r)); }, chunk, g % 2,
                                                     first, second);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        a[m][j][0] = first[2 * j];
                        a[m][j][1] = first[2 * j + 1];
                        a[m][j][2] = second[2 * j];
                        a[m][j][3] = second[2 * j + 1];
                    }
                }
            });
        }
        const TileCursor& next = then.i < rows.count ? then : at;  // behind the last tile any will do
        const auto next_rows = rows.rows(next, 1);
        const Chunk next_chunk = chunk_of(next);
        Arrivals(&barriers.weights_made[turn.buffer]).wait(turn.phase);
        const TileWeights& of = weights[turn.buffer];

        // each warp that scores has a maximum of its own
        bool differs = false;
        float top = column_base;
#pragma unroll
        for (int m = 0; m < groups; m++) {
            const float base_now = of.base[m][g];
            differs = differs || base_now != tile_base[m];
            tile_base[m] = base_now;
            top = fmaxf(top, base_now - weight_headroom);
        }
        if (__any_sync(0xffffffffu, differs)) {
            const float rescale = top > column_base ? exp2f(column_base - top) : 1.0f;
            column_base = top;
#pragma unroll
            for (int m = 0; m < groups; m++) {
                share[m] = __float2half2_rn(tile_base[m] == -INFINITY ? 0.0f : exp2f(tile_base[m] - top));
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int from = 4 * (2 * c + i);  // a lane of column 2c + i
                const float by = __shfl_sync(0xffffffffu, rescale, from);
                base[i] = __shfl_sync(0xffffffffu, top, from);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sums[j][i] *= by;
                    sums[j][2 + i] *= by;
                }
            }
        }
        const uint64_t used = barriers.used[now % used_masks];
        // all of them first: what is waited for in shared memory behind the next rows' loads would wait for these too
        uint32_t w[groups][2];
#pragma unroll
        for (int m = 0; m < groups; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const auto* const two = reinterpret_cast<const uint32_t*>(&of.of[g][16 * m + 2 * c + 8 * h]);
                w[m][h] = bits(__hmul2(half2_of(*two), share[m]));
            }
        }
        warp_arrives(&barriers.weights_used[turn.buffer]);
#pragma unroll
        for (int m = 0; m < groups; m++) {
            const int slot = 16 * m + 2 * c;
            auto& of_slots = a[Kind == any_kind ? m : 0];
            if constexpr (Kind != any_kind) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    uint32_t first[4];
                    uint32_t second[4];
                    StoredChunk<Kind, true>::decode(stored[m][2 * h], stored[m][2 * h + 1], first, second);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        of_slots[j][2 * h] = first[j];
                        of_slots[j][2 * h + 1] = second[j];
                    }
                }
            }
            if (used != ~uint64_t{0}) {
                // free slots hold anything, NaN too
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const auto pair = static_cast<uint32_t>(used >> (slot + 8 * h)) & 3;
                    const uint32_t mask = (pair & 1 ? 0x0000ffffu : 0) | (pair & 2 ? 0xffff0000u : 0);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        of_slots[j][2 * h] &= mask;
                        of_slots[j][2 * h + 1] &= mask;
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < 4; j++) mma(sums[j], of_slots[j], w[m][0], w[m][1]);
            load_slots(next_rows, next_chunk, m);
        }
        at = then;
    }
}

}  // namespace lkv::cuda
