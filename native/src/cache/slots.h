// How many slots a cache has in each region. The converter counts with the same functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/options.h"

namespace lkv {

constexpr int slot_tile = 64;  // kernels walk slots in tiles of this many; middle and ring are whole ones
constexpr int64_t whole_tiles(int64_t n) { return (n + slot_tile - 1) / slot_tile * slot_tile; }

// A ubatch enters the recent region whole before the rest is demoted: 512 exact tokens more would cost 1.6 % of an f16 cache at 32K, half
// the budget that an exact window is for.
constexpr int longest_exact_ubatch = 128;
// On a GPU, whose products want long ubatches, they cost that where tokens cannot see each other's rows.
constexpr int longest_exact_ubatch_on_gpu = 512;

struct CacheSlots {
    int sink = 0;               // 0: there is no such region
    int recent = 0;             // likewise
    int middle = 0;             // of layers that hold the context
    int ring = 0;               // of layers that hold a window, 0: there are none
    int window = 0;             // the longest of these, in tokens
    std::vector<bool> in_ring;  // of every layer
};

// windows: in tokens, of every layer, 0: none. blocks: the plan has K in token blocks, so that all layers hold the context.
CacheSlots count_slots(const KvCacheOptions& options, std::span<const int> windows, bool blocks);

// Ubatches are as short as an exact window needs them. full_beside_latents: in every layer exact rows are full ones, others latents; then
// tokens of a long ubatch on a GPU may attend to each other's rows before these are stored.
void shorten_ubatches(PlacementOptions& options, bool full_beside_latents, bool on_gpu);

}  // namespace lkv
