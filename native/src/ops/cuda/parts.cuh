// How the slots in use are cut in parts. The grid is fixed, so that one captured graph serves a cache as it fills; how many
// of its parts have work follows from the number of slots, which lies on the device.
#pragma once

#include "ops/cuda/args.h"

namespace lkv::cuda {

struct Parts {
    int before_1, before_2,
        n_tiles;  // tiles before regions 1 and 2, and all; not an array, which would leave the registers
    int count;    // parts with work, 1 … n_split

    __device__ explicit Parts(const AttnArgs& p) {
        static_assert(max_regions == 3);
        const auto tiles = [&](int r) { return r < p.n_regions ? (p.n_slots[r] + p.tile - 1) / p.tile : 0; };
        before_1 = tiles(0);
        before_2 = before_1 + tiles(1);
        n_tiles = before_2 + tiles(2);
        count = max(1, min(p.n_split, (n_tiles + p.least_tiles - 1) / p.least_tiles));
    }
    __device__ int begin(int part) const { return static_cast<int>(static_cast<int64_t>(n_tiles) * part / count); }
    __device__ int region_of(int tile) const { return (tile >= before_1 ? 1 : 0) + (tile >= before_2 ? 1 : 0); }
    __device__ int tiles_before(int region) const { return region == 0 ? 0 : (region == 1 ? before_1 : before_2); }
};

}  // namespace lkv::cuda
