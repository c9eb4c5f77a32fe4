// Weighted sums of rows of V straight on integer codes. A lane is a byte of a segment's codes, of two slots at once; what a byte
// holds of a channel is (byte >> bits·k):
//
//   Σ_t p_t x_t = step · Σ_t n_t·code_t + Σ_t p_t·minimum_t          n_t = round(p_t · scale_t / step), 16 bits, t over a tile
//   Σ_t p_t x_t = step · (unit · Σ_t n_t·code_t + bottom · Σ_t n_t)      where rows have the scales: n_t once for all segments of one
#pragma once

#include "ops/cpu/codes/codes.h"
#include "ops/cpu/tile.h"

namespace lkv {

// out[r][c] += Σ_slot weights[r][slot] · value(slot, c), weights >= 0, at most max_coded_rows rows. For is_coded groups.
void coded_values(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, ReadAhead& ahead, int n_rows,
                  const float* const* weights, float* const* out);

}  // namespace lkv
