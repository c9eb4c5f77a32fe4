// What a kernel sees of the cache: one region, one layer.
#pragma once

#include <cstdint>

#include "cache/row.h"

namespace lkv {

// Slots are rows; a slot's bytes mean nothing unless its seq bits say so.
struct RegionView {
    const uint8_t* k_rows;  // [n_slots, k.row_bytes]; in token blocks: n_slots rounded up to whole ones
    const uint8_t* v_rows;  // [n_slots, v.row_bytes]
    const int32_t* pos;     // [n_slots] position, -1 = free
    const uint64_t* seq;    // [n_slots] bit s: slot belongs to sequence s
    int32_t n_slots;        // slots in use (upper bound of used slots + 1), not the capacity
    RowLayout k;            // how this region stores a K row; kept channels may be fewer than in another region
    RowLayout v;
};

}  // namespace lkv
