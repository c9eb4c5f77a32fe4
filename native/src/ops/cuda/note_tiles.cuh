// What the warps that score need to know of a tile beside its latents: the slots' positions and sequences, and the queries turned
// back by the tile's lowest position. By the warps that make the latents, behind those: keys are turned after their products.
#pragma once

#include <climits>

#include "ops/cuda/rebuild_tables.cuh"
#include "ops/cuda/specialized_tiles.cuh"

namespace lkv::cuda {

// What the queries see between them.
struct QuerySight {
    int first_pos = INT_MAX;
    uint64_t seqs = 0;

    // By all lanes of a warp. rows_at: see decode_specialized_kernel
    __device__ QuerySight(const AttnArgs& p, const int32_t* rows_at, int n_rows) {
        const int lane = threadIdx.x % 32;
        if (lane < n_rows) {
            const int token = rows_at[lane] / p.n_head;
            first_pos = p.q_pos[token];
            seqs = uint64_t{1} << p.q_seq[token];
        }
        first_pos = __reduce_min_sync(0xffffffffu, first_pos);
        seqs = __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(seqs)) |
               static_cast<uint64_t>(__reduce_or_sync(0xffffffffu, static_cast<uint32_t>(seqs >> 32))) << 32;
        // a window hides what lies far back, and ALiBi counts how far
        if (p.window != 0 || p.alibi_slopes != nullptr) first_pos = -1;
    }
};

template <int B>
class TileNoter {
public:
    // notes: `note` bytes from buffer to buffer, of which there are 2^note_bits. warp: 0 … 3; B of them note a tile
    __device__ TileNoter(const AttnArgs& p, const RebuildTables& tables, SpecializedBarriers& barriers,
                         const QuerySight& sight, uint8_t* notes, int note, int note_bits, int warp)
        : p_(p),
          tables_(tables),
          barriers_(barriers),
          sight_(sight),
          notes_(notes),
          note_(note),
          note_bits_(note_bits),
          member_(warp % B),
          first_phase_(RebuildTables::phase_of(p, 16 * member_ + static_cast<int>(threadIdx.x % 32) % 16)) {}

    // For who needs it before the notes. By one of the tile's warps, the last, which has the fewest queries to turn.
    __device__ void publish_reach(const TileMarks& marks, Reach& to) const {
        if (member_ != B - 1) return;
        const Reach reach(marks);
        if (threadIdx.x % 32 == 0) to = reach;
    }

    // marks: of tile i
    __device__ void note(int i, const TileMarks& marks) const {
        const Turn turn(i, note_bits_);
        const int lane = threadIdx.x % 32;
        const bool used[2] = {marks.seq[0] != 0, marks.seq[1] != 0};
        const Reach reach(marks);
        auto& of = *reinterpret_cast<TileNotes*>(notes_ + turn.buffer * note_);
        auto* const turned = reinterpret_cast<uint2*>(&of + 1);
        Arrivals(&barriers_.notes_used[turn.buffer]).wait(turn.phase ^ 1);
        for (int j0 = 2 * member_; j0 < tables_.turned_tiles; j0 += 2 * B) {
            const int plane = 8 * j0 + lane % 16;
            const float2 mine = j0 == 2 * member_ ? RebuildTables::query_angle(p_, plane, first_phase_, reach.lowest)
                                                  : RebuildTables::query_angle(p_, plane, reach.lowest);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (j0 + j < tables_.turned_tiles) {
                    turned[(j0 + j) * 32 + lane] = tables_.turned_queries(j0 + j, mine, 8 * j);
                }
            }
        }
        if (member_ == B - 1) {
            const uint64_t both = marks.seq[0] & marks.seq[1];
            const uint64_t common =
                __reduce_and_sync(0xffffffffu, static_cast<uint32_t>(both)) |
                static_cast<uint64_t>(__reduce_and_sync(0xffffffffu, static_cast<uint32_t>(both >> 32))) << 32;
            const uint64_t filled =
                __ballot_sync(0xffffffffu, used[0]) | static_cast<uint64_t>(__ballot_sync(0xffffffffu, used[1])) << 32;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                of.past[lane + 32 * h] = used[h] ? marks.pos[h] - reach.lowest : 0;
                of.seq[lane + 32 * h] = marks.seq[h];
            }
            if (lane == 0) {
                barriers_.used[i % used_masks] = filled;
                of.lowest = reach.lowest;
                of.whole = reach.highest <= sight_.first_pos && (common & sight_.seqs) == sight_.seqs;
            }
        }
        warp_arrives(&barriers_.notes_made[turn.buffer]);
    }

private:
    const AttnArgs& p_;
    const RebuildTables& tables_;
    SpecializedBarriers& barriers_;
    QuerySight sight_;
    uint8_t* notes_;
    int note_;
    int note_bits_;
    int member_;
    uint64_t first_phase_;
};

}  // namespace lkv::cuda
