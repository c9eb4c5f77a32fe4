// How the slots in use are cut in tiles, and the tiles in parts, a thread block each.
#pragma once

#include "ops/cuda/shared_plan.h"
#include "ops/cuda/softmax/slot_counts.cuh"

namespace lkv::cuda {

// A launch's slots of every region: all in use, or those of a chunk.
struct MlaSlots {
    int32_t of[max_regions];
    int32_t first[max_regions];
    int32_t key_row[max_regions];  // expanded row of slot `first`

    __device__ explicit MlaSlots(const AttnArgs& p) {
        const SlotCounts counts(p);
        const MlaKeys& keys = p.mla.keys;
        int before = 0;  // tiles
#pragma unroll
        for (int r = 0; r < max_regions; r++) {
            of[r] = counts.of[r];
            first[r] = key_row[r] = 0;
            if (keys.rows == nullptr) continue;
            first[r] = max(0, (keys.first_tile - before) * expand_tile);
            key_row[r] = (before - keys.first_tile) * expand_tile + first[r];
            of[r] = max(0, min(of[r], (keys.first_tile + keys.n_tiles - before) * expand_tile) - first[r]);
            before += (counts.of[r] + expand_tile - 1) / expand_tile;
        }
    }
};

struct MlaTiles {
    int before_1, before_2, n_tiles;  // tiles before regions 1 and 2, and all
    int tile;                         // slots of a tile of compressed rows
    int count;                        // parts with work, 1 … n_split

    __device__ MlaTiles(const AttnArgs& p, const MlaSlots& n_slots) : tile(p.mla.tile) {
        const auto count_all = [&] {
            const auto tiles = [&](int r) {
                const int slots = slots_of(p, r);
                return (n_slots.of[r] + slots - 1) >> (__ffs(slots) - 1);
            };
            before_1 = tiles(0);
            before_2 = before_1 + tiles(1);
            n_tiles = before_2 + tiles(2);
        };
        count_all();
        // A short cache in more parts, but merging them takes its time: 8B at depth 4096, 269 tokens/s in 128 parts, 278 in 64.
        while (tile > least_tile && n_tiles < p.n_split / 2) {
            tile /= 2;
            count_all();
        }
        count = max(1, min(p.n_split, n_tiles));
    }
    // Slots of a tile of region r.
    __device__ int slots_of(const AttnArgs& p, int r) const {
        return (p.mla.small_tiles >> r & 1) != 0 ? least_tile : tile;
    }
    // The first tile of a part, or the last one's end.
    __device__ int begin(int part) const {
        const int product = n_tiles * part;
        if (product < 1 << 20) return small_quotient(product, count);
        return static_cast<int>(static_cast<uint32_t>(product) / static_cast<uint32_t>(count));
    }
    __device__ int region_of(int t) const { return (t >= before_1 ? 1 : 0) + (t >= before_2 ? 1 : 0); }
    __device__ int tiles_before(int region) const { return region == 0 ? 0 : (region == 1 ? before_1 : before_2); }
};

}  // namespace lkv::cuda
