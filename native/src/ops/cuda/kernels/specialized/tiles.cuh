// What the warps of the specialized kernel share: the tiles of a part, where their rows lie, and the barriers between roles.
#pragma once

#include <climits>

#include "ops/cuda/gpu/bulk_copy.cuh"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/kernels/specialized/layout.h"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// One tile after the other of a part: 64 slots of one region from slot `first`.
struct TileCursor {
    int i = 0;  // which of the part's
    int region = 0;
    int first = 0;
    int end = 0;  // of the region's slots

    __device__ int n() const { return min(specialized_tile, end - first); }
};

// The tiles of a part and where their rows lie. groups: [n_regions][K, V]; chunks: [n_regions][4·blocks of K, of V]
template <int B>
struct TileRows {
    const SpecializedArgs& p;
    const SlotCounts& counts;
    const Parts& parts;
    int begin;
    int count;
    const GroupTable* groups;
    const Chunk* chunks;
    const int32_t* n_slots;  // the counts, in shared memory

    // At the part's tile i; past the last one nothing but i is meant.
    __device__ TileCursor cursor(int i) const {
        const int tile = begin + max(0, min(i, count - 1));
        TileCursor at;
        at.i = i;
        at.region = parts.region_of(tile);
        at.first = (tile - parts.tiles_before(at.region)) * specialized_tile;
        at.end = at.region == 0 ? counts.of[0] : (at.region == 1 ? counts.of[1] : counts.of[2]);
        return at;
    }
    // Not before n_slots is there.
    __device__ void step(TileCursor& at, int tiles) const {
        at.i += tiles;
        at.first += tiles * specialized_tile;
        while (at.first >= at.end && at.i < count) {
            at.first -= round_up(at.end, specialized_tile);
            at.end = n_slots[++at.region];
        }
    }
    __device__ const Chunk* chunks_of(const TileCursor& at, int side) const {
        return chunks + (2 * at.region + side) * 4 * B;
    }
    __device__ const GroupTable& group(const TileCursor& at, int side) const { return groups[2 * at.region + side]; }
    // The group's bytes of a tile's rows in device memory. side: 0 K, 1 V
    struct Rows {
        const uint8_t* at;
        uint32_t row_bytes;
        int last;
        // Past the last slot any row will do.
        __device__ uint32_t offset(int slot) const { return static_cast<uint32_t>(min(slot, last)) * row_bytes; }
        __device__ const uint8_t* row(int slot) const { return at + offset(slot); }
    };
    __device__ Rows rows(const TileCursor& at, int side) const {
        const RegionArgs& region = p.regions[at.region];
        const uint8_t* const from = side == 0 ? region.k_rows : region.v_rows;
        const uint32_t row_bytes = side == 0 ? region.k_row_bytes : region.v_row_bytes;
        return {from + static_cast<int64_t>(at.first) * row_bytes + group(at, side).first, row_bytes, at.n() - 1};
    }
    // The tile's rows into the L2 cache, by one warp. They lie side by side, and the thread blocks of the same part that come by take a
    // share each: all, or every second (by_pairs).
    __device__ void fetch(const TileCursor& at, int side, bool by_pairs = false) const {
        if (at.i >= count || threadIdx.x % 32 != 0) return;
        const RegionArgs& region = p.regions[at.region];
        const uint32_t row_bytes = side == 0 ? region.k_row_bytes : region.v_row_bytes;
        const uint8_t* const from =
            (side == 0 ? region.k_rows : region.v_rows) + static_cast<int64_t>(at.first) * row_bytes;
        const int pair_bits = by_pairs ? 1 : 0;
        const uint32_t bytes = static_cast<uint32_t>(at.n()) * row_bytes / (gridDim.x >> pair_bits);
        prefetch_bytes(from + (blockIdx.x >> pair_bits) * bytes, bytes);
    }
};

// Buffers are filled in turn: tile i uses buffer i % 2^bits for the (i / 2^bits)th time.
struct Turn {
    int buffer;
    uint32_t phase;

    __device__ Turn(int i, int bits) : buffer(i & ((1 << bits) - 1)), phase(static_cast<uint32_t>(i) >> bits & 1) {}
};

// Positions and sequences of slots lane and lane + 32 of a tile; unused ones have position 0 and no sequence.
struct TileMarks {
    int pos[2] = {};
    uint64_t seq[2] = {};

    TileMarks() = default;
    __device__ TileMarks(const RegionArgs& region, const TileCursor& at) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int slot = static_cast<int>(threadIdx.x % 32) + 32 * h;
            if (slot >= at.n()) continue;
            pos[h] = region.pos[at.first + slot];
            seq[h] = region.seq[at.first + slot];
        }
    }
};

// The positions of a tile's tokens; 0 and -1 without any.
struct alignas(8) Reach {
    int lowest;
    int highest;

    Reach() = default;
    __device__ Reach(int lowest, int highest) : lowest(lowest), highest(highest) {}
    // The reach of tokens of these sequences. All lanes of a warp call it.
    __device__ Reach(const TileMarks& marks, uint64_t seqs) {
        const bool used[2] = {(marks.seq[0] & seqs) != 0, (marks.seq[1] & seqs) != 0};
        highest = __reduce_max_sync(0xffffffffu, max(used[0] ? marks.pos[0] : -1, used[1] ? marks.pos[1] : -1));
        lowest =
            __reduce_min_sync(0xffffffffu, min(used[0] ? marks.pos[0] : INT_MAX, used[1] ? marks.pos[1] : INT_MAX));
        if (highest < 0) lowest = 0;
    }
    __device__ bool empty() const { return highest < 0; }
    // Whether all of the next tile's tokens are within a span from the lowest of these.
    __device__ bool serves(const Reach& next, int span) const {
        return next.empty() || (!empty() && next.lowest >= lowest && next.highest - lowest < span);
    }
    // Slots in the order of their positions, as almost always, are within one window.
    __device__ bool within(int span) const { return highest - lowest < span; }
};

// Bytes of the maxima and sums of weights of an item's query rows, by every warp that scores.
constexpr uint32_t passed_maxima = n_scoring_warps * decode_rows * sizeof(float2);

struct SpecializedBarriers {
    uint64_t used[used_masks];        // slots of tile i % used_masks that hold a token
    Reach reach[max_latent_buffers];  // of the tile whose latents are in that buffer
    uint64_t latents_made[max_latent_buffers];
    uint64_t latents_used[max_latent_buffers];
    uint64_t notes_made[max_latent_buffers];
    uint64_t notes_used[max_latent_buffers];
    uint64_t weights_made[n_weight_buffers];
    uint64_t weights_used[n_weight_buffers];
    uint64_t weights_passed[n_passed_buffers];  // of a pair, by the other
    uint64_t maxima_passed;                     // likewise, when all tiles are done
    uint64_t factor_arrives;

    // By all threads: one that did it alone would be waited for. unit: KV heads, of which each has warps that read a tile's latents
    // and write its weights
    __device__ void init(int unit, int blocks, bool paired) {
        const int scorers = unit * n_scoring_warps / 2;
        const int warp = static_cast<int>(threadIdx.x) / 32;
        const int i = static_cast<int>(threadIdx.x) % 32;
        if (i < max_latent_buffers) {
            if (warp == 0) Arrivals(&latents_made[i]).init(blocks);
            if (warp == 1) Arrivals(&latents_used[i]).init(paired ? 2 * scorers : scorers);
            if (warp == 2) Arrivals(&notes_made[i]).init(blocks);
            if (warp == 3) Arrivals(&notes_used[i]).init(scorers);
        }
        if (i < n_weight_buffers) {
            if (warp == 4) Arrivals(&weights_made[i]).init(scorers);
            if (warp == 5) Arrivals(&weights_used[i]).init(paired ? n_summing_warps : blocks);
        }
        if (i < n_passed_buffers && warp == 6) Arrivals(&weights_passed[i]).init();
        if (threadIdx.x == 0) Arrivals(&factor_arrives).init();
        if (paired && warp == 7 && i == 0) {
            Arrivals(&maxima_passed).init();
            Arrivals(&maxima_passed).announce(passed_maxima);
        }
    }
};

// One warp has arrived.
__device__ inline void warp_arrives(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrivals(barrier).arrive();
}

}  // namespace lkv::cuda
