// Scores of query rows straight on integer codes, for rows of K that are coded (codes.h). A lane is a slot, so nothing is added up across
// lanes, and scale and minimum of a segment are vectors as well:
//
//   q · x = Σ_segment step · (scale · Σ n·code + minimum · Σ n)          n = round(q / step), query_bits of a code's bits
//   q · x = Σ_segment step · scale · (unit · Σ n·code + bottom · Σ n)      where the row has the scales: what is in brackets is the query's
//
// A row is words: of a segment its scale and minimum, if it has any, then its codes. A tile is transposed, words by slots, and a word gives packs of
// two or four codes, spread evenly over its bits. Channels stay in the order in which they leave the words; the queries are put
// into the same one, a pack a word.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "cache/row.h"
#include "ops/cpu/codes/codes.h"
#include "ops/cpu/tile.h"

namespace lkv {

// n = round(q / step), [q.size()]; returns the step.
template <int CodeBits>
float round_query(std::span<const float> q, int32_t* n) {
    // of 16 bits, what keeps a sum of products with codes of 8 within 32
    const int width = std::max(1, static_cast<int>(q.size()));
    const auto most =
        static_cast<float>(query_bits(CodeBits) == 8 ? byte_query : std::min(32767, 0x7fffffff / 255 / width));
    float reach = 0.0f;
    for (const float x : q) reach = std::max(reach, std::fabs(x));
    const float inverse = reach > 0.0f ? most / reach : 0.0f;
    for (size_t c = 0; c < q.size(); c++) n[c] = static_cast<int32_t>(std::lrintf(q[c] * inverse));
    return reach / most;
}

// Packs that a group's codes make, at most: pairs of them.
constexpr int coded_packs(int kept, int n_segments) { return kept / 2 + 8 * n_segments; }

// Query rows of a group as integers. packs: [coded_packs, n_rows]; steps and sums, step · Σ n: [n_segments, n_rows]. Where the row has the
// scale, unit and bottom are in them.
struct CodedQueries {
    int32_t* packs;
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
