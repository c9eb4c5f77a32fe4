// A tile is 64 slots of one group, dequantized. Two layouts, both made of panels of 16 columns (gemm.h):
//   by channel   [slot / 16][channel][slot % 16]     K, and latents that get rebuilt: columns are slots
//   by slot      [channel / 16][slot][channel % 16]  V: columns are channels, the last panel padded with zeros
#pragma once

#include <cstdint>

#include "cache/formats/channel.h"
#include "cache/row.h"

namespace lkv {

constexpr int tile_slots = 64;

// Where a tile's slots lie in one region's rows.
struct TileRows {
    const uint8_t* slot[tile_slots];  // slots without a token point at a row of zero bytes, which every format reads as
                                      // finite values
    const uint8_t* block[tile_slots / block_slots];  // first row of each block; null where no slot of it holds a token
};

// dst: [4][kept][16].
void load_by_channel(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, float* dst);

// dst: [ceil(kept / 16)][64][16]. Not for formats of blocks.
void load_by_slot(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, float* dst);

}  // namespace lkv
