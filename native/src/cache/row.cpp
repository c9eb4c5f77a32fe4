#include "cache/row.h"

#include <algorithm>
#include <span>
#include <type_traits>

#include "cache/formats.h"

namespace lkv {

namespace {

std::span<const SegmentLayout> segments(const RowLayout& layout) {
    if (layout.n_groups == 0) return {};
    const GroupLayout& last = layout.groups[layout.n_groups - 1];
    return {layout.segments, static_cast<size_t>(last.first_segment + last.n_segments)};
}

std::span<const SegmentLayout> segments(const RowLayout& layout, const GroupLayout& group) {
    return {layout.segments + group.first_segment, static_cast<size_t>(group.n_segments)};
}

Format format_of(const SegmentLayout& s) { return static_cast<Format>(s.format); }

// A group whose segments are scaled by it.
void write_scaled_group(std::span<const SegmentLayout> segments, const float* x, uint8_t* row) {
    const auto write = [&](auto at) {
        // f(a value of the type, segment) for those that have the scale
        const auto each = [&](const auto& f) {
            for (const SegmentLayout& s : segments) {
                with_format(format_of(s), [&](auto of) {
                    if constexpr (is_scaled_by_group<decltype(of)>) {
                        if constexpr (decltype(of)::scale_at == decltype(at)::value) f(of, s);
                    }
                });
            }
        };
        const uint8_t scale = group_scale<decltype(at)::value>(
            [&](const auto& f) { each([&](auto of, const SegmentLayout& s) { f(of, x + s.column, s.width); }); });
        each([&](auto of, const SegmentLayout& s) {
            of.write(x + s.column, s.width, inverse_of(scale), row + s.offset);
        });
        row[segments.front().scales + at] = scale;
    };
    write(std::integral_constant<int, 0>{});
    write(std::integral_constant<int, 1>{});
    write(std::integral_constant<int, 2>{});
    write(std::integral_constant<int, 3>{});
}

}  // namespace

bool has_format(const RowLayout& layout, bool (*of)(Format)) {
    if (layout.n_groups == 0) return false;
    return std::ranges::any_of(segments(layout), [of](const SegmentLayout& s) { return of(format_of(s)); });
}

bool has_group_scales(const RowLayout& layout) { return has_format(layout, format_scaled_by_group); }

bool same_layout(const RowLayout& a, const RowLayout& b) {
    const auto same_segment = [](const SegmentLayout& s, const SegmentLayout& t) {
        return s.format == t.format && s.width == t.width && s.offset == t.offset && s.scales == t.scales;
    };
    bool same = a.row_bytes == b.row_bytes && a.n_groups == b.n_groups;
    for (int g = 0; same && g < a.n_groups; g++) {
        const GroupLayout& ga = a.groups[g];
        const GroupLayout& gb = b.groups[g];
        same = ga.n_segments == gb.n_segments &&
               std::equal(a.segments + ga.first_segment, a.segments + ga.first_segment + ga.n_segments,
                          b.segments + gb.first_segment, same_segment);
    }
    return same;
}

bool in_token_blocks(const RowLayout& layout) { return has_format(layout, format_in_token_blocks); }

void write_row(const RowLayout& layout, const float* x, uint8_t* row) {
    const bool is_scaled = has_group_scales(layout);
    for (int g = 0; g < layout.n_groups; g++) {
        const auto own = segments(layout, layout.groups[g]);
        if (is_scaled && !own.empty()) {
            write_scaled_group(own, x, row);
            continue;
        }
        for (const SegmentLayout& s : own) write_segment(format_of(s), x + s.column, s.width, row + s.offset);
    }
}

void read_row(const RowLayout& layout, const uint8_t* row, float* x) {
    for (const SegmentLayout& s : segments(layout)) {
        read_segment(format_of(s), row + s.offset, row + s.scales, s.width, x + s.column);
    }
    for (int g = 0; g < layout.n_groups; g++) {
        const GroupLayout& group = layout.groups[g];
        std::fill(x + group.column + group.kept, x + group.column + group.width, 0.0f);
    }
}

}  // namespace lkv
