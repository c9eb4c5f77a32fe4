// Attention of a few query rows straight on stored rows: for one token the dequantized tile would cost more to write and
// read back than the products themselves. Scale and offset stay out of the inner loop:
//   q · x = scale · Σ q·code + offset · Σ q          Σ_t p_t x_t = Σ_t (p_t·scale_t) code_t + Σ_t p_t·offset_t
//   q · x = Σ (q·scale)·code + Σ q·offset            where a token block has them per channel
#pragma once

#include <cstdint>

#include "cache/row.h"
#include "ops/cpu/tile.h"

namespace lkv {

constexpr int max_direct_rows = 8;  // past this, one dequantized tile and a matrix product win

// scores[r][slot] = Σ_c q[r][c] · value(slot, c), over the group's kept channels.
// q: [n_rows] pointers to at least kept floats; scores: [n_rows] pointers to 64 floats.
void direct_scores(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, ReadAhead& ahead,
                   int n_rows, const float* const* q, float* const* scores);

// out[r][c] += Σ_slot weights[r][slot] · value(slot, c). Not for formats of token blocks.
void direct_values(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, ReadAhead& ahead,
                   int n_rows, const float* const* weights, float* const* out);

}  // namespace lkv
