#include "cache/row.h"

#include <algorithm>
#include <span>

#include "cache/formats.h"

namespace lkv {

namespace {

std::span<const SegmentLayout> segments(const RowLayout& layout) {
    if (layout.n_groups == 0) return {};
    const GroupLayout& last = layout.groups[layout.n_groups - 1];
    return {layout.segments, static_cast<size_t>(last.first_segment + last.n_segments)};
}

Format format_of(const SegmentLayout& s) { return static_cast<Format>(s.format); }

}  // namespace

bool has_format(const RowLayout& layout, bool (*of)(Format)) {
    if (layout.n_groups == 0) return false;
    return std::ranges::any_of(segments(layout), [of](const SegmentLayout& s) { return of(format_of(s)); });
}

bool in_blocks(const RowLayout& layout) { return has_format(layout, format_in_blocks); }

void write_row(const RowLayout& layout, const float* x, uint8_t* row) {
    for (const SegmentLayout& s : segments(layout)) {
        write_segment(format_of(s), x + s.column, s.width, row + s.offset);
    }
}

void read_row(const RowLayout& layout, const uint8_t* row, float* x) {
    for (const SegmentLayout& s : segments(layout)) read_segment(format_of(s), row + s.offset, s.width, x + s.column);
    for (int g = 0; g < layout.n_groups; g++) {
        const GroupLayout& group = layout.groups[g];
        std::fill(x + group.column + group.kept, x + group.column + group.width, 0.0f);
    }
}

}  // namespace lkv
