// The specialized kernel's first role: K's latents as stored -> f16 matrices in shared memory, operand a of the products that rebuild
// keys, decoded once for all KV heads that share them.
#pragma once

#include "ops/cuda/dequant.cuh"
#include "ops/cuda/note_tiles.cuh"
#include "ops/cuda/specialized_tiles.cuh"
#include "ops/cuda/warpgroup.cuh"

namespace lkv::cuda {

// latents: [buffers][4·B steps of 16 channels][8 of 8 slots][2 of 8 channels][8 slots][8 channels] f16, as Operand reads them.
// queries_are_there(): waits for the tables' queries. warp: 0 … 3; B of them share a tile's slots, and the others make the next tiles.
template <int B, int Kind, class Wait>
__device__ inline void make_latents(const TileRows<B>& rows, const TileNoter<B>& noter, SpecializedBarriers& barriers,
                                    uint8_t* latents, int buffer_bits, int warp, Wait&& queries_are_there) {
    constexpr int step_bytes = specialized_tile * 16 * 2;
    constexpr int apart = tiles_at_once(B);
    constexpr int groups = specialized_tile / 16 / B;  // of 16 slots, a warp's
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const int member = warp % B;
    const int first_slot = 16 * groups * member;
    // of the four 8 x 8 matrices of a step: slots 0 … 7 and 8 … 15, then the same of the next eight channels
    uint8_t* const own = latents + (first_slot / 8 + lane / 8 % 2) * 256 + lane / 16 * 128 + lane % 8 * 16;
    TileCursor at = rows.cursor(warp / B);
    // of the tile at `at`
    StoredChunk<Kind, false> stored[groups][B][2];
    const auto load = [&](const TileCursor& of) {
        if constexpr (Kind != any_kind) {
            const auto tile = rows.rows(of, 0);
#pragma unroll
            for (int b = 0; b < B; b++) {
                const Chunk chunk = rows.chunks_of(of, 0)[4 * b + c];
#pragma unroll
                for (int m = 0; m < groups; m++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        stored[m][b][h].load(tile.at, tile.offset(first_slot + 16 * m + g + 8 * h), chunk);
                    }
                }
            }
        }
    };
    bool waited = false;
    TileMarks marks;
    const auto load_marks = [&](const TileCursor& of) { marks = TileMarks(rows.p.regions[of.region], of); };
    if (at.i < rows.count) {
        load(at);
        load_marks(at);
    }
#pragma unroll 1
    while (at.i < rows.count) {
        TileCursor then = at;
        rows.step(then, apart);
        if (member == 0) rows.fetch(then, 0);
        uint32_t x[groups][B][8];
        uint32_t y[groups][B][8];
        if constexpr (Kind != any_kind) {
#pragma unroll
            for (int m = 0; m < groups; m++) {
#pragma unroll
                for (int b = 0; b < B; b++) {
                    stored[m][b][0].decode(x[m][b]);
                    stored[m][b][1].decode(y[m][b]);
                }
            }
        } else {
            const auto tile = rows.rows(at, 0);
            const Chunk* const chunks = rows.chunks_of(at, 0);
            with_group_kind<Kind>(rows.group(at, 0).kind, [&](auto kind) __attribute__((always_inline)) {
#pragma unroll
                for (int m = 0; m < groups; m++) {
                    const uint8_t* const first = tile.row(first_slot + 16 * m + g);
                    const uint8_t* const second = tile.row(first_slot + 16 * m + g + 8);
#pragma unroll
                    for (int b = 0; b < B; b++) {
                        two_slots<decltype(kind)::value>(first, second, chunks[4 * b + c], x[m][b], y[m][b]);
                    }
                }
            });
        }
        const Turn turn(at.i, buffer_bits);
        Arrivals(&barriers.latents_used[turn.buffer]).wait(turn.phase ^ 1);
        uint8_t* const to = own + turn.buffer * 4 * B * step_bytes;
#pragma unroll
        for (int m = 0; m < groups; m++) {
#pragma unroll
            for (int b = 0; b < B; b++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    store_four(to + m * 512 + (4 * b + j) * step_bytes,
                               {x[m][b][j], y[m][b][j], x[m][b][j + 4], y[m][b][j + 4]});
                }
            }
        }
        before_async_access();
        noter.publish_reach(marks, barriers.reach[turn.buffer]);
        warp_arrives(&barriers.latents_made[turn.buffer]);
        if (!waited) queries_are_there();
        waited = true;
        noter.note(at.i, marks);
        at = then;
        // as late as that: what is waited for in shared memory would wait for these too
        if (at.i < rows.count) {
            load(at);
            load_marks(at);
        }
    }
    if (!waited && rows.count > 0) queries_are_there();
}

}  // namespace lkv::cuda
