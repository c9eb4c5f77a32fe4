// Products straight on integer codes, for rows whose segments are all q8 … q1 or all n8 … n1. Both take 16-bit integers of the other factor, so that a pair of products is one instruction and exact:
//   code_scores.h   q · x          a lane is a slot
//   code_values.h   Σ_t p_t x_t    a lane is a byte of codes
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <type_traits>

#include "base/wide.h"
#include "cache/formats.h"
#include "cache/row.h"

namespace lkv {

constexpr int min_coded_rows = 3;   // of V: for fewer, two slots' codes cost more to bring together than the products
constexpr int max_coded_rows = 32;  // query rows of a tile: past this one dequantized tile and a matrix product win
constexpr int max_coded_width = 1024;  // channels of a segment

// Four products of bytes are one instruction where two of 16 bits are. Against codes of 4 bits and fewer a byte loses a fifteenth
// of what those codes lose (docs/lab/cpu.md); against codes of 8 bits it would lose as much as they do.
constexpr int query_bits(int code_bits) { return code_bits == 8 ? 16 : 8; }
constexpr int byte_query = 127;  // the largest integer of 8 bits

inline std::span<const SegmentLayout> segments_of(const RowLayout& layout, const GroupLayout& group) {
    return {layout.segments + group.first_segment, static_cast<size_t>(group.n_segments)};
}

// Calls f with the bits of a code as a constant. False: not one of these formats.
template <class F>
bool with_bits(int format, F&& f) {
    switch (static_cast<Format>(format)) {
        case Format::q8:
        case Format::n8:
            f(std::integral_constant<int, 8>{});
            return true;
        case Format::q6:
        case Format::n6:
            f(std::integral_constant<int, 6>{});
            return true;
        case Format::q5:
        case Format::n5:
            f(std::integral_constant<int, 5>{});
            return true;
        case Format::q4:
        case Format::n4:
            f(std::integral_constant<int, 4>{});
            return true;
        case Format::q3:
        case Format::n3:
            f(std::integral_constant<int, 3>{});
            return true;
        case Format::q2:
        case Format::n2:
            f(std::integral_constant<int, 2>{});
            return true;
        case Format::q1:
        case Format::n1:
            f(std::integral_constant<int, 1>{});
            return true;
        default:
            return false;
    }
}

// A segment of a group that has the scales: where in a row its own lies, and its levels, step · code + bottom, before the scale.
struct ScaledByGroup {
    int scale_at;
    float step;
    float bottom;
};
inline std::optional<ScaledByGroup> scaled_by_group(const SegmentLayout& segment) {
    return with_format(static_cast<Format>(segment.format), [&](auto f) -> std::optional<ScaledByGroup> {
        if constexpr (is_scaled_by_group<decltype(f)>) {
            return ScaledByGroup{segment.scales + f.scale_at, f.step, f.bottom};
        } else {
            return std::nullopt;
        }
    });
}

// Where a segment's codes begin in a row: after scale and minimum, if it has them.
inline int codes_at(const SegmentLayout& segment) {
    const bool scaled = format_scaled_by_group(static_cast<Format>(segment.format));
    return segment.offset + (scaled ? 0 : AffineFormat<8>::codes_at);
}

// Whether a group's segments are all of these formats.
inline bool is_coded(const RowLayout& layout, const GroupLayout& group) {
    const auto segments = segments_of(layout, group);
    return !segments.empty() && std::all_of(segments.begin(), segments.end(), [](const SegmentLayout& segment) {
        return segment.width <= max_coded_width && with_bits(segment.format, [](auto) {});
    });
}

// Where planes.h puts the codes of a byte, of widths of one plane: channel of a segment.
template <int Bits>
constexpr int channel_of(int byte, int plane) {
    if constexpr (Bits == 8) return byte;
    if constexpr (Bits == 4) return 16 * (byte / 8) + byte % 8 + 8 * plane;
    if constexpr (Bits == 2) return 16 * (byte / 4) + byte % 4 + 4 * plane;
    return 8 * byte + plane;
}

// Calls f with n, 1 … Most, as a constant.
template <int Most, class F>
void with_rows(int n, F&& f) {
    if constexpr (Most > 0) {
        if (n == Most) return f(std::integral_constant<int, Most>{});
        with_rows<Most - 1>(n, f);
    }
}

// Rows in as few blocks of at most Most as there can be, all of much the same size: f(number of rows as a constant, first row).
template <int Most, class F>
void for_even_blocks(int n_rows, F&& f) {
    const int n_blocks = (n_rows + Most - 1) / Most;
    for (int block = 0, first = 0; block < n_blocks; block++) {
        const int n = (n_rows - first + n_blocks - block - 1) / (n_blocks - block);
        with_rows<Most>(n, [&](auto rows) { f(rows, first); });
        first += n;
    }
}

}  // namespace lkv
