// How many slots a cache has in each region.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/options.h"
#include "cache/pages.h"

namespace lkv {

constexpr int slot_tile = 64;  // kernels walk slots in tiles of this many; middle and ring are whole ones
constexpr int64_t whole_tiles(int64_t n) { return (n + slot_tile - 1) / slot_tile * slot_tile; }

struct CacheSpec;
struct HParams;

struct CacheSlots {
    int sink = 0;               // 0: there is no such region
    int recent = 0;             // likewise
    int middle = 0;             // of layers that hold the context
    int ring = 0;               // of layers that hold a window, 0: there are none
    int window = 0;             // the longest of these, in tokens
    std::vector<bool> in_ring;  // of every layer
    // Recent that shares memory with the middle: what the fullest middle leaves of it, whole pages.
    int least_exact = 0;
};

// Whether a window of exact tokens grows into the memory of the compressed ones, see placement/tiers.cpp.
bool window_grows(const KvCacheOptions& options, const CacheSpec& spec, const HParams& hparams);

// windows: in tokens, of every layer, 0: none. blocks: the plan has K in token blocks, so that all layers hold the context.
CacheSlots count_slots(const KvCacheOptions& options, std::span<const int> windows, bool blocks);

}  // namespace lkv
