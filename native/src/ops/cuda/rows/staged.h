// How stored rows lie in a tile in shared memory.
#pragma once

#include "ops/cuda/problem.h"

namespace lkv::cuda {

// Rows that are copied whole and start on no 16 bytes lie in tiles as they were stored: their first slots do start on 16 bytes,
// and 4 bytes at a time would be four times the copies.
LKV_HD inline bool copied_whole(uint32_t row_bytes, const GroupTable& group) {
    return group.access_bits == 2 && group.bytes == row_bytes;
}

// A staged row is a multiple of 16 bytes, an odd one so that eight rows start in different banks.
LKV_HD constexpr int pitch_of(int bytes) { return round_up(bytes > 16 ? bytes : 16, 16) | 16; }

// Warps side by side over the channel blocks; the others share out the slots.
LKV_HD constexpr int channel_warps(int blocks) { return blocks <= 1 ? 1 : (blocks <= 2 ? 2 : (blocks <= 4 ? 4 : 8)); }

}  // namespace lkv::cuda
