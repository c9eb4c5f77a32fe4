// A tile is 64 slots of one group, dequantized. Two layouts, both made of panels of 16 columns (gemm.h):
//   by channel   [slot / 16][channel][slot % 16]     K, and latents that get rebuilt: columns are slots
//   by slot      [channel / 16][slot][channel % 16]  V: columns are channels, the last panel padded with zeros
#pragma once

#include <cstdint>

#include "cache/row.h"

namespace lkv {

constexpr int tile_slots = 64;

// rows[i]: the row of slot i of the tile; slots without one point at a row of zero bytes, which every format reads as
// finite values. dst: [4][kept][16].
void load_by_channel(const RowLayout& layout, const GroupLayout& group, const uint8_t* const* rows, float* dst);

// dst: [ceil(kept / 16)][64][16].
void load_by_slot(const RowLayout& layout, const GroupLayout& group, const uint8_t* const* rows, float* dst);

}  // namespace lkv
