// What a kernel sees of the cache: one region, one layer.
#pragma once

#include <cstdint>

#include "cache/row.h"

namespace lkv {

// Slots are rows; a slot's bytes mean nothing unless its seq bits say so.
struct RegionView {
    const uint8_t* k_rows;  // of slot 0; the others by row_offset, in token blocks whole ones
    const uint8_t* v_rows;
    int64_t k_page;  // from a page of slots to the next one, in bytes
    int64_t v_page;
    const int32_t* pos;   // [n_slots] position, -1 = free
    const uint64_t* seq;  // [n_slots] bit s: slot belongs to sequence s
    int32_t n_slots;      // slots in use (upper bound of used slots + 1), not the capacity
    RowLayout k;          // how this region stores a K row; kept channels may be fewer than in another region
    RowLayout v;

    const uint8_t* k_row(int slot) const { return k_rows + row_offset(slot, k_page, k.row_bytes); }
    const uint8_t* v_row(int slot) const { return v_rows + row_offset(slot, v_page, v.row_bytes); }
};

}  // namespace lkv
