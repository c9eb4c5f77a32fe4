// The specialized kernel's third role: sums [16 channels x 8 queries] += Vᵀ [16 channels x 16 slots] · weights. A warp has one
// 64-channel block of V: of every tile or, where V has fewer blocks than there are warps, of every second or fourth. Thread blocks that
// work in pairs sum half of the channels each, for the query rows of both, so that V is decoded once.
#pragma once

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/gpu/pair.cuh"
#include "ops/cuda/kernels/specialized/tiles.cuh"
#include "ops/cuda/rows/dequant.cuh"

namespace lkv::cuda {

// Weights of 16 slots are at most 2^stale_max. Those of slots far below the others' maximum become small f16 numbers: up to 2^15
// leaves them the most bits.
constexpr float weight_headroom = 15.0f - stale_max;

// What a warp sums of its channels for an item's query rows, from `groups` times 16 slots of a tile.
template <int groups>
class ValueSums {
public:
    float of[4][4] = {};  // as mma has them: [16 channels] of query rows 2c and 2c + 1, see sum_channel
    float base[2] = {-INFINITY, -INFINITY};  // what those of columns 2c and 2c + 1 are relative to, a power of two

    __device__ ValueSums() {
#pragma unroll
        for (int m = 0; m < groups; m++) {
            tile_base_[m] = -INFINITY;
            share_[m] = __float2half2_rn(0.0f);
        }
    }

    // A tile's weights of its slots from 16·first on, relative to what the sums are then.
    __device__ void take(const TileWeights& tile, int first, uint32_t (&w)[groups][2]) {
        const int lane = threadIdx.x % 32;
        // each warp that scores has a maximum of its own
        bool differs = false;
        float top = column_base_;
#pragma unroll
        for (int m = 0; m < groups; m++) {
            const float now = tile.base[first + m][lane / 4];
            differs = differs || now != tile_base_[m];
            tile_base_[m] = now;
            top = fmaxf(top, now - weight_headroom);
        }
        if (__any_sync(0xffffffffu, differs)) rescale(top);
#pragma unroll
        for (int m = 0; m < groups; m++) {
            const uint2 words = tile.of[first + m][lane];
            w[m][0] = bits(__hmul2(half2_of(words.x), share_[m]));
            w[m][1] = bits(__hmul2(half2_of(words.y), share_[m]));
        }
    }

private:
    __device__ void rescale(float top) {
        const float by = top > column_base_ ? exp2f(column_base_ - top) : 1.0f;
        column_base_ = top;
#pragma unroll
        for (int m = 0; m < groups; m++) {
            share_[m] = __float2half2_rn(tile_base_[m] == -INFINITY ? 0.0f : exp2f(tile_base_[m] - top));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int from = 4 * (2 * static_cast<int>(threadIdx.x % 4) + i);  // a lane of column 2c + i
            const float by_column = __shfl_sync(0xffffffffu, by, from);
            base[i] = __shfl_sync(0xffffffffu, top, from);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                of[j][i] *= by_column;
                of[j][2 + i] *= by_column;
            }
        }
    }

    float column_base_ = -INFINITY;  // of column g
    float tile_base_[groups];        // what weights of column g were relative to, of 16 slots each
    __half2 share_[groups];          // 2^(tile_base_ - column_base_)
};

LKV_HD constexpr int summed_groups(bool paired) { return specialized_tile / 16 / summed_items(paired); }

// sums: of the item's query rows and, of a pair, the other item's. warp: 0 … 3. A pair's warps have a block and half of every tile's
// slots each.
template <int B, int Kind, bool paired>
__device__ inline void sum_values(const TileRows<B>& rows, SpecializedBarriers& barriers, const TileWeights* weights,
                                  int warp, ValueSums<summed_groups(paired)> (&sums)[summed_items(paired)]) {
    constexpr int groups = summed_groups(paired);
    constexpr int apart = paired ? 1 : tiles_at_once(B);
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const Peer peer(&barriers);
    const int member = paired ? 2 * peer.rank() + warp % 2 : warp % B;
    const int first_group = paired ? warp / 2 * groups : 0;
    const TileWeights* const passed = weights + n_weight_buffers;
    TileCursor at = rows.cursor(paired ? 0 : warp / B);
    const auto chunk_of = [&](const TileCursor& of) { return rows.chunks_of(of, 1)[4 * member + g / 2]; };
    const auto slot_of = [=](int m, int r) { return 16 * (first_group + m) + 2 * c + r % 2 + r / 2 * 8; };
    // of the tile at `at`, on their way while its weights are waited for
    StoredChunk<Kind, true> stored[groups][4];
    const auto load_slots = [&](const typename TileRows<B>::Rows& tile, const Chunk& chunk, int m) {
        if constexpr (Kind != any_kind) {
#pragma unroll
            for (int r = 0; r < 4; r++) stored[m][r].load(tile.at, tile.offset(slot_of(m, r)), chunk, g % 2);
        }
    };
    // One of the warp's groups of weights to the other thread block; the warp beside it has the other.
    const auto pass_on = [&](const TileWeights& tile, int buffer) {
        const int group = first_group + warp % 2;
        const uint2 words = tile.of[group][lane];
        const uint32_t arrivals = peer(&barriers.weights_passed[buffer]);
        send(peer(&passed[buffer].of[group][lane]), make_float2(__uint_as_float(words.x), __uint_as_float(words.y)),
             arrivals);
        if (c == 0) send(peer(&passed[buffer].base[group][g]), tile.base[group][g], arrivals);
    };
    if (at.i < rows.count) {
#pragma unroll
        for (int m = 0; m < groups; m++) load_slots(rows.rows(at, 1), chunk_of(at), m);
    }
#pragma unroll 1
    for (bool more = at.i < rows.count; more;) {
        const int now = at.i;
        const Turn turn(now, weight_buffer_bits);
        const Turn passed_turn(now, passed_buffer_bits);
        // rows of any kind are loaded and decoded in one; for two items what is decoded is kept
        uint32_t a[Kind == any_kind || paired ? groups : 1][4][4];
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
        more = now + apart < rows.count;
        if (more) rows.step(at, apart);
        if (more && (paired ? warp : member) == 0) rows.fetch(at, 1);
        const auto next_rows = rows.rows(at, 1);  // behind the last tile any will do
        const Chunk next_chunk = chunk_of(at);
        if (paired && warp == 0 && lane == 0) {
            Arrivals(&barriers.weights_passed[passed_turn.buffer]).announce(sizeof(TileWeights));
        }
        Arrivals(&barriers.weights_made[turn.buffer]).wait(turn.phase);
        if (paired) pass_on(weights[turn.buffer], passed_turn.buffer);
        // all of them first: what is waited for in shared memory behind the next rows' loads would wait for these too
        uint32_t w[groups][2];
        sums[0].take(weights[turn.buffer], first_group, w);
        const uint64_t used = barriers.used[now % used_masks];
        warp_arrives(&barriers.weights_used[turn.buffer]);
#pragma unroll
        for (int m = 0; m < groups; m++) {
            const int slot = slot_of(m, 0);
            auto& of_slots = a[Kind == any_kind || paired ? m : 0];
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
            for (int j = 0; j < 4; j++) mma(sums[0].of[j], of_slots[j], w[m][0], w[m][1]);
            if constexpr (!paired) load_slots(next_rows, next_chunk, m);
        }
        if constexpr (paired) {
            Arrivals(&barriers.weights_passed[passed_turn.buffer]).wait(passed_turn.phase);
            sums[1].take(passed[passed_turn.buffer], first_group, w);
#pragma unroll
            for (int m = 0; m < groups; m++) {
#pragma unroll
                for (int j = 0; j < 4; j++) mma(sums[1].of[j], a[m][j], w[m][0], w[m][1]);
                load_slots(next_rows, next_chunk, m);
            }
        }
    }
}

}  // namespace lkv::cuda
