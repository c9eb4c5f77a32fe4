// What a ubatch asks of the cache: counted once, after the cache claimed its slots, and read by graph, nodes and kernels alike.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/kv_cache.h"

namespace lkv {

// Whether a GPU's tokens should read the slots of their own sequences alone: those of exact windows, and those of the middle.
struct Apart {
    bool windows = false;
    bool middle = false;
};

struct BatchSlots {
    std::vector<int32_t> pos;    // [n_tokens]
    std::vector<int32_t> seq;    // [n_tokens]
    std::vector<SlotRef> slots;  // [n_tokens] where each token's row goes
    // The tokens attend to each other's rows as they come, before any format: the cache shows these from the next batch on.
    bool own_rows = false;
    // [n_tokens, K width], rows of K that wait for their token block, in the memory of the cache's rows; null: none waits
    float* k_staged = nullptr;
    Apart apart[2];  // in layers of the middle, and in those that have the ring in its place

    // Finds `apart`, once the other members are there.
    void count(const Placement& placement);
};

}  // namespace lkv
