// Scores of query rows straight on integer codes, for rows of K whose segments are all q8, q4, q2 or q1: what the converter's own
// plans use. A lane is a slot, so nothing is added up across lanes, and scale and minimum of a segment are vectors as well:
//
//   q · x = step · (scale · Σ n·code + minimum · Σ n)          n = round(q / step), 16 bits
//
// A row is words: of a segment its scale and minimum, then its codes. A tile is turned, words by slots, and a word gives pairs
// of codes, `bits` apart in its low half and 16 bits above: (word >> bits·i) & mask, i < 16/bits. Channels stay in the order in
// which they leave the words; the queries are put into the same one, a pair a word.
#pragma once

#include <cstdint>
#include <span>

#include "cache/row.h"
#include "ops/cpu/codes.h"
#include "ops/cpu/direct.h"

namespace lkv {

// Pairs that a group's codes make, at most.
constexpr int coded_pairs(int kept, int n_segments) { return kept / 2 + 8 * n_segments; }

// Query rows of a group as integers. pairs: [coded_pairs, n_rows]; sums: [n_segments, n_rows], Σ n; steps: [n_rows].
struct CodedQueries {
    int32_t* pairs;
    float* sums;
    float* steps;
    int n_rows;
};

// q: [n_rows] pointers to at least kept floats. Fills what queries points at.
void code_queries(const RowLayout& layout, const GroupLayout& group, std::span<const float* const> q,
                  const CodedQueries& queries);

// scores[r][slot] = q_r · value(slot). words: scratch, [words of the group, 64]
void coded_scores(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, ReadAhead& ahead,
                  const CodedQueries& queries, uint32_t* words, float* const* scores);

// Words that a row has of a group.
int coded_words(const RowLayout& layout, const GroupLayout& group);

}  // namespace lkv
