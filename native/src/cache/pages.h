// Where a slot's row lies.
#pragma once

#include <cstdint>

#include "base/half.h"

namespace lkv {

// Rows of a layer's region lie in pages of so many slots, one after another within a page. Regions that share memory have pages of other
// layers in between (rows/arena.cpp). A multiple of every kernel's tile.
constexpr int page_slots = 128;

// Kernels read so many slots at a time, and choose among as many.
constexpr int step_slots = 32;

constexpr int whole_pages(int n) { return (n + page_slots - 1) / page_slots * page_slots; }

// A page of rows that nothing lies between, in bytes.
LKV_HD constexpr int64_t bytes_of_page(int64_t row_bytes) { return page_slots * row_bytes; }

// From slot 0 to a slot, in bytes. page_bytes: from a page to the next one, below 0 where slots begin at the end of what is shared.
LKV_HD constexpr int64_t row_offset(int64_t slot, int64_t page_bytes, int64_t row_bytes) {
    static_assert(page_slots == 1 << 7);
    return (slot >> 7) * page_bytes + (slot & (page_slots - 1)) * row_bytes;
}

}  // namespace lkv
