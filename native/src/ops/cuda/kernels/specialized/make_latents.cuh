// The specialized kernel's first role: K's latents as stored -> f16 matrices in shared memory, operand a of the products that rebuild
// keys, decoded once for all KV heads that share them.
#pragma once

#include "ops/cuda/gpu/pair.cuh"
#include "ops/cuda/gpu/warpgroup.cuh"
#include "ops/cuda/kernels/specialized/note_tiles.cuh"
#include "ops/cuda/kernels/specialized/tiles.cuh"
#include "ops/cuda/rows/dequant.cuh"

namespace lkv::cuda {

// latents: [buffers][8 of 8 slots][4·B steps of 16 channels][2 of 8 channels][8 slots][8 channels] f16, as Operand reads them.
// rows_at, n_rows: see QuerySight; queries_are_there(): waits for the tables' queries. warp: 0 … 3; B of them share a tile's slots, and the
// others make the next tiles. paired: the other thread block of a pair makes every second tile for both, and this one notes all.
template <int B, int Kind, bool paired, class Wait>
__device__ inline void make_latents(const TileRows<B>& rows, SpecializedBarriers& barriers, uint8_t* latents,
                                    int buffer_bits, int warp, TileNoter<B>& noter, const int32_t* rows_at, int n_rows,
                                    Wait&& queries_are_there) {
    constexpr int rows_bytes = 8 * 64 * B * 2;  // of 8 slots
    constexpr int tile_bytes = specialized_tile / 8 * rows_bytes;
    constexpr int apart = tiles_at_once(B);
    constexpr int step = paired ? 2 * apart : apart;
    constexpr int groups = specialized_tile / 16 / B;  // of 16 slots, a warp's
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int c = lane % 4;
    const int member = warp % B;
    const int first_slot = 16 * groups * member;
    // of the four 8 x 8 matrices of a step: slots 0 … 7 and 8 … 15, then the same of the next eight channels
    uint8_t* const own = latents + (first_slot / 8 + lane / 8 % 2) * rows_bytes + lane / 16 * 128 + lane % 8 * 16;
    const Peer peer(&barriers);
    const int rank = paired ? peer.rank() : 0;
    TileCursor at = rows.cursor(warp / B);  // the first of the one or two tiles that this warp notes in a step
    TileCursor mine = at;                   // of which it makes this one
    if (paired) rows.step(mine, rank * apart);
    // of the tile at `mine`
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
    // This warp's slots to the other thread block, with the tile's reach by the last of the tile's warps.
    const auto send_latents = [&](int buffer, const Reach& reach) {
        constexpr uint32_t bytes = 2 * groups * rows_bytes;
        const uint32_t arrivals = peer(&barriers.latents_made[buffer]);
        const bool sends_reach = member == B - 1;
        announce_there(arrivals, bytes + (sends_reach ? sizeof(Reach) : 0));
        const uint8_t* const from = latents + buffer * tile_bytes + first_slot / 8 * rows_bytes;
        copy_there(peer(from), from, bytes, arrivals);
        if (sends_reach) {
            send(peer(&barriers.reach[buffer]),
                 make_float2(__int_as_float(reach.lowest), __int_as_float(reach.highest)), arrivals);
        }
    };
    bool waited = false;
#pragma unroll 1
    while (at.i < rows.count) {
        // not before the notes of the tile before: what is waited for in shared memory would wait for these too
        if (mine.i < rows.count) load(mine);
        const bool two = paired && at.i + 1 < rows.count;
        TileMarks marks[2];  // of the tiles that are noted; then the first ones of what this warp notes
        marks[0] = TileMarks(rows.p.regions[at.region], at);
        if (two) {
            TileCursor next = at;
            rows.step(next, apart);
            marks[1] = TileMarks(rows.p.regions[next.region], next);
        }
        TileCursor then = mine;
        rows.step(then, step);
        if (member == 0) rows.fetch(then, 0, paired);
        if (!waited) noter.look(QuerySight(rows.p, rows_at, n_rows));  // behind the loads
        Reach reach[2];
        bool once = false;  // whether queries are turned once for two tiles
        const auto find_reach = [&]() __attribute__((always_inline)) {
            reach[0] = reach[1] = noter.reach(marks[0]);
            if (!two) return;
            reach[1] = noter.reach(marks[1]);
            once = reach[0].serves(reach[1], wide_angle_span);
            if (once) reach[1].lowest = reach[0].lowest;
            // value by value: an array that is indexed lies in memory
#pragma unroll
            for (int h = 0; h < 2; h++) {
                marks[0].pos[h] = noter.notes_first() ? marks[0].pos[h] : marks[1].pos[h];
                marks[0].seq[h] = noter.notes_first() ? marks[0].seq[h] : marks[1].seq[h];
            }
        };
        if (paired) find_reach();
        if (mine.i < rows.count) {
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
                const auto tile = rows.rows(mine, 0);
                const Chunk* const chunks = rows.chunks_of(mine, 0);
                with_group_kind<Kind>(rows.group(mine, 0).kind, [&](auto kind) __attribute__((always_inline)) {
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
            const Turn turn(mine.i, buffer_bits);
            if (!paired) find_reach();
            Arrivals(&barriers.latents_used[turn.buffer]).wait(turn.phase ^ 1);
            uint8_t* const to = own + turn.buffer * tile_bytes;
#pragma unroll
            for (int m = 0; m < groups; m++) {
#pragma unroll
                for (int b = 0; b < B; b++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        store_four(to + 2 * m * rows_bytes + (4 * b + j) * 256,
                                   {x[m][b][j], y[m][b][j], x[m][b][j + 4], y[m][b][j + 4]});
                    }
                }
            }
            before_async_access();
            // for who needs it before the notes
            const Reach of_mine(rank == 0 ? reach[0].lowest : reach[1].lowest,
                                rank == 0 ? reach[0].highest : reach[1].highest);
            if (member == B - 1 && lane == 0) barriers.reach[turn.buffer] = of_mine;
            warp_arrives(&barriers.latents_made[turn.buffer]);
            if (paired && lane == 0) send_latents(turn.buffer, of_mine);
        }
        if (!waited) queries_are_there();
        waited = true;
        mine = then;
        if constexpr (paired) {
            noter.note_two(at.i, two, marks[0], reach, once);
        } else {
            noter.note(at.i, marks[0], reach[0]);
        }
        rows.step(at, step);
    }
    if (!waited) queries_are_there();
}

}  // namespace lkv::cuda
