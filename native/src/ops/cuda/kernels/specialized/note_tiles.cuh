// What the warps that score need to know of a tile beside its latents: the slots' positions and sequences, and the queries turned
// back by the tile's lowest position. By the warps that make the latents, behind those: keys are turned after their products.
#pragma once

#include <climits>

#include "ops/cuda/kernels/decode/rebuild_tables.cuh"
#include "ops/cuda/kernels/specialized/tiles.cuh"

namespace lkv::cuda {

// What the queries see between them.
struct QuerySight {
    int first_pos = INT_MAX;
    uint64_t seqs = 0;

    QuerySight() = default;
    // By all lanes of a warp. rows_at: see decode_specialized_kernel
    __device__ QuerySight(const SpecializedArgs& p, const int32_t* rows_at, int n_rows) {
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
    __device__ TileNoter(const SpecializedArgs& p, const RebuildTables& tables, SpecializedBarriers& barriers,
                         uint8_t* notes, int note, int note_bits, int warp)
        : p_(p),
          tables_(tables),
          barriers_(barriers),
          notes_(notes),
          note_(note),
          note_bits_(note_bits),
          member_(warp % B),
          first_phase_(RebuildTables::phase_of(p, 16 * member_ + static_cast<int>(threadIdx.x % 32) % 16)) {}

    // Before the first tile.
    __device__ void look(const QuerySight& sight) { sight_ = sight; }

    // The reach of the tokens that the queries may see.
    __device__ Reach reach(const TileMarks& marks) const { return Reach(marks, sight_.seqs); }

    // marks, reach: of tile i
    __device__ void note(int i, const TileMarks& marks, const Reach& reach) const {
        const Turn turn(i, note_bits_);
        Arrivals(&barriers_.notes_used[turn.buffer]).wait(turn.phase ^ 1);
        turn_queries(turn.buffer, reach.lowest);
        if (member_ == B - 1) note_slots(i, turn.buffer, turn.buffer, marks, reach);
        warp_arrives(&barriers_.notes_made[turn.buffer]);
    }

    // Which of two tiles this warp notes, if any.
    __device__ bool notes_first() const { return member_ == B - 1; }

    // The same of tile i and, if `two`, of the next one. once: the queries are turned back by the same positions for both, and turned once;
    // they lie in the first one's buffer then. marks: of the one that this warp notes
    __device__ void note_two(int i, bool two, const TileMarks& marks, const Reach (&reach)[2], bool once) const {
        const Turn turn[2] = {Turn(i, note_bits_), Turn(i + 1, note_bits_)};
        // for both: the second one's last use of its buffer may have used queries from the first one's
#pragma unroll
        for (int k = 0; k < 2; k++) Arrivals(&barriers_.notes_used[turn[k].buffer]).wait(turn[k].phase ^ 1);
#pragma unroll 1
        for (int k = 0; k < (once || !two ? 1 : 2); k++) {
            turn_queries(turn[0].buffer + k, k == 0 ? reach[0].lowest : reach[1].lowest);
        }
        if (member_ == B - 1 || (two && member_ == B - 2)) {
            const bool first = notes_first();
            note_slots(first ? i : i + 1, first ? turn[0].buffer : turn[1].buffer,
                       first || once ? turn[0].buffer : turn[1].buffer, marks,
                       Reach(first ? reach[0].lowest : reach[1].lowest, first ? reach[0].highest : reach[1].highest));
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                if (k == 0 || two) Arrivals(&barriers_.notes_made[turn[k].buffer]).arrive();
            }
        }
    }

private:
    // Into this buffer, back by `base` positions.
    __device__ void turn_queries(int buffer, int base) const {
        const int lane = threadIdx.x % 32;
        auto* const turned = reinterpret_cast<uint2*>(notes_ + buffer * note_ + sizeof(TileNotes));
        for (int j0 = 2 * member_; j0 < tables_.turned_tiles; j0 += 2 * B) {
            const int plane = 8 * j0 + lane % 16;
            const float2 mine = j0 == 2 * member_ ? RebuildTables::query_angle(p_, plane, first_phase_, base)
                                                  : RebuildTables::query_angle(p_, plane, base);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (j0 + j < tables_.turned_tiles) {
                    turned[(j0 + j) * 32 + lane] = tables_.turned_queries(j0 + j, mine, 8 * j);
                }
            }
        }
    }

    // By one warp. turned: the buffer that has the queries
    __device__ void note_slots(int i, int buffer, int turned, const TileMarks& marks, const Reach& reach) const {
        const int lane = threadIdx.x % 32;
        auto& of = *reinterpret_cast<TileNotes*>(notes_ + buffer * note_);
        const bool used[2] = {marks.seq[0] != 0, marks.seq[1] != 0};
        const uint64_t both = marks.seq[0] & marks.seq[1];
        const uint64_t common = __reduce_and_sync(0xffffffffu, static_cast<uint32_t>(both)) |
                                static_cast<uint64_t>(__reduce_and_sync(0xffffffffu, static_cast<uint32_t>(both >> 32)))
                                    << 32;
        const uint64_t filled =
            __ballot_sync(0xffffffffu, used[0]) | static_cast<uint64_t>(__ballot_sync(0xffffffffu, used[1])) << 32;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            of.past[lane + 32 * h] = (marks.seq[h] & sight_.seqs) != 0 ? marks.pos[h] - reach.lowest : 0;
            of.seq[lane + 32 * h] = marks.seq[h];
        }
        if (lane == 0) {
            barriers_.used[i % used_masks] = filled;
            of.lowest = reach.lowest;
            of.whole = reach.highest <= sight_.first_pos && (common & sight_.seqs) == sight_.seqs;
            of.turned = turned;
        }
    }

    const SpecializedArgs& p_;
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
