// The specialized kernel's first role: what the warps that score need of a tile. K's latents as stored -> f16 matrices in shared
// memory, operand a of the products that rebuild keys, decoded once for all KV heads that share them; the slots' positions and
// sequences; the queries turned back by the tile's lowest position.
#pragma once

#include <climits>

#include "ops/cuda/dequant.cuh"
#include "ops/cuda/rebuild_tables.cuh"
#include "ops/cuda/specialized_tiles.cuh"
#include "ops/cuda/warpgroup.cuh"

namespace lkv::cuda {

// latents: [buffers][4·B steps of 16 channels][8 of 8 slots][2 of 8 channels][8 slots][8 channels] f16, as Operand reads them.
// notes: `note` bytes from buffer to buffer; queries_are_there(): waits for the tables' queries. warp: 0 … 3; B of them share a tile's
// slots, and the others make the next tiles.
template <int B, int Kind, class Wait>
__device__ inline void make_latents(const AttnArgs& p, const TileRows<B>& rows, const RebuildTables& tables,
                                    SpecializedBarriers& barriers, uint8_t* latents, uint8_t* notes, int note,
                                    int buffer_bits, int note_bits, int warp, Wait&& queries_are_there) {
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
    TileCursor ahead = at;
    rows.step(ahead, apart);
    TileMarks next;
    if (at.i < rows.count) next = TileMarks(p.regions[at.region], at);
    bool waited = false;
    const uint64_t first_phase = RebuildTables::phase_of(p, 16 * member + lane % 16);
#pragma unroll 1
    for (; at.i < rows.count; rows.step(ahead, apart)) {
        rows.fetch(ahead, 0, member);
        const auto tile = rows.rows(at, 0);
        const Chunk* const chunks = rows.chunks_of(at, 0);
        uint32_t x[groups][B][8];
        uint32_t y[groups][B][8];
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
        const TileMarks marks = next;
        const Turn turn(at.i, buffer_bits);
        const Turn note_turn(at.i, note_bits);
        rows.step(at, apart);
        if (at.i < rows.count) next = TileMarks(p.regions[at.region], at);
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

        const bool used[2] = {marks.seq[0] != 0, marks.seq[1] != 0};
        const int lowest =
            __reduce_min_sync(0xffffffffu, min(used[0] ? marks.pos[0] : INT_MAX, used[1] ? marks.pos[1] : INT_MAX));
        if (!waited) queries_are_there();
        waited = true;
        auto& of = *reinterpret_cast<TileNotes*>(notes + note_turn.buffer * note);
        auto* const turned = reinterpret_cast<uint2*>(&of + 1);
        for (int j0 = 2 * member; j0 < tables.used_tiles; j0 += 2 * B) {
            const int plane = 8 * j0 + lane % 16;
            const float2 mine = j0 == 2 * member ? RebuildTables::query_angle(p, plane, first_phase, lowest)
                                                 : RebuildTables::query_angle(p, plane, lowest);
            uint2 q[2];
#pragma unroll
            for (int j = 0; j < 2; j++) q[j] = tables.turned_queries(j0 + j, mine, 8 * j);
            // as late as that: they are in use longer than latents
            if (j0 == 2 * member) Arrivals(&barriers.notes_used[note_turn.buffer]).wait(note_turn.phase ^ 1);
#pragma unroll
            for (int j = 0; j < 2; j++) turned[(j0 + j) * 32 + lane] = q[j];
        }
        if (member == 0) {
            const int highest =
                __reduce_max_sync(0xffffffffu, max(used[0] ? marks.pos[0] : -1, used[1] ? marks.pos[1] : -1));
            const uint64_t both = marks.seq[0] & marks.seq[1];
            const uint64_t common =
                __reduce_and_sync(0xffffffffu, static_cast<uint32_t>(both)) |
                static_cast<uint64_t>(__reduce_and_sync(0xffffffffu, static_cast<uint32_t>(both >> 32))) << 32;
            const uint64_t filled =
                __ballot_sync(0xffffffffu, used[0]) | static_cast<uint64_t>(__ballot_sync(0xffffffffu, used[1])) << 32;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                of.pos[lane + 32 * h] = marks.pos[h];
                of.seq[lane + 32 * h] = marks.seq[h];
            }
            if (lane == 0) {
                of.used = filled;
                of.common = common;
                of.lowest = lowest;
                of.highest = highest;
            }
        }
        before_async_access();
        warp_arrives(&barriers.latents_made[turn.buffer]);
    }
    if (!waited && rows.count > 0) queries_are_there();
}

}  // namespace lkv::cuda
