#include "cache/row.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cache/formats.h"

namespace lkv {

namespace {

std::string at(size_t group, size_t segment) {
    return " at group " + std::to_string(group) + ", segment " + std::to_string(segment);
}

[[noreturn]] void refuse(const std::string& expected, const std::string& got) {
    throw std::invalid_argument("[row] expected " + expected + "; got " + got);
}

Format format_of(const SegmentLayout& s) { return static_cast<Format>(s.format); }

void write_group(const RowLayout& layout, const GroupLayout& group, const float* x, uint8_t* row) {
    for (int s = group.first_segment; s < group.first_segment + group.n_segments; s++) {
        const SegmentLayout& segment = layout.segments[s];
        write_segment(format_of(segment), x + segment.column - group.column, segment.width, row + segment.offset);
    }
}

void read_group_row(const RowLayout& layout, const GroupLayout& group, const uint8_t* row, float* x) {
    for (int s = group.first_segment; s < group.first_segment + group.n_segments; s++) {
        const SegmentLayout& segment = layout.segments[s];
        read_segment(format_of(segment), row + segment.offset, segment.width, x + segment.column - group.column);
    }
}

// Quantizing what was just dequantized may move a code: segments that both layouts store alike keep their bytes.
void copy_unchanged_segments(const RowLayout& from, const GroupLayout& a, const uint8_t* src, const RowLayout& to,
                             const GroupLayout& b, uint8_t* dst) {
    for (int i = 0; i < std::min(a.n_segments, b.n_segments); i++) {
        const SegmentLayout& s = from.segments[a.first_segment + i];
        const SegmentLayout& d = to.segments[b.first_segment + i];
        if (s.format == d.format && s.width == d.width && s.column == d.column && !format_in_blocks(format_of(d))) {
            std::copy_n(src + s.offset, format_bytes(format_of(s), s.width), dst + d.offset);
        }
    }
}

void check_same_channels(const RowLayout& from, const RowLayout& to) {
    if (from.n_groups != to.n_groups || from.width != to.width) {
        refuse(std::to_string(from.n_groups) + " groups of " + std::to_string(from.width) + " channels in both layouts",
               std::to_string(to.n_groups) + " groups of " + std::to_string(to.width) + " channels in the second");
    }
    for (int g = 0; g < from.n_groups; g++) {
        if (from.groups[g].width != to.groups[g].width) {
            refuse(
                std::to_string(from.groups[g].width) + " channels in group " + std::to_string(g) + " of both layouts",
                std::to_string(to.groups[g].width) + " in the second");
        }
    }
}

}  // namespace

RowPlan::RowPlan(const std::vector<std::vector<SegmentSpec>>& groups) {
    for (size_t g = 0; g < groups.size(); g++) {
        GroupLayout group{};
        group.column = width_;
        group.first_segment = static_cast<int32_t>(segments_.size());
        bool dropping = false;
        for (size_t s = 0; s < groups[g].size(); s++) {
            const auto [format, width] = groups[g][s];
            if (!format_exists(format)) {
                refuse("the number of a row format that this version has",
                       std::to_string(static_cast<int32_t>(format)) + at(g, s));
            }
            const int multiple = format_width_multiple(format);
            if (width <= 0 || width % multiple != 0) {
                refuse("a segment width that is a positive multiple of " + std::to_string(multiple) + " for format " +
                           format_name(format),
                       std::to_string(width) + at(g, s));
            }
            if (format == Format::none) {
                dropping = true;
            } else if (dropping) {
                refuse("none segments only at the end of a group",
                       std::string(format_name(format)) + " after none" + at(g, s));
            } else {
                segments_.push_back({static_cast<int32_t>(format), width, width_, row_bytes_});
                row_bytes_ += format_bytes(format, width);
                group.kept += width;
                group.n_segments++;
            }
            group.width += width;
            width_ += width;
        }
        if (group.width == 0) {
            refuse("at least one segment in each group", "none at group " + std::to_string(g));
        }
        groups_.push_back(group);
    }
}

RowPlan RowPlan::uniform(int n_groups, int width, Format format) {
    return RowPlan(std::vector<std::vector<SegmentSpec>>(static_cast<size_t>(n_groups), {{format, width}}));
}

RowLayout RowPlan::view() const {
    return {segments_.data(), groups_.data(), static_cast<int32_t>(groups_.size()), width_, row_bytes_};
}

void write_row(const RowLayout& layout, const float* x, uint8_t* row) {
    for (int g = 0; g < layout.n_groups; g++) {
        write_group(layout, layout.groups[g], x + layout.groups[g].column, row);
    }
}

void read_row(const RowLayout& layout, const uint8_t* row, float* x) {
    for (int g = 0; g < layout.n_groups; g++) {
        const GroupLayout& group = layout.groups[g];
        read_group_row(layout, group, row, x + group.column);
        std::fill(x + group.column + group.kept, x + group.column + group.width, 0.0f);
    }
}

void read_group(const RowLayout& layout, int group, const uint8_t* rows, int64_t stride, int n_rows, float* dst,
                int ld) {
    for (int i = 0; i < n_rows; i++) {
        read_group_row(layout, layout.groups[group], rows + i * stride, dst + static_cast<int64_t>(i) * ld);
    }
}

void move_rows(const RowLayout& from, const uint8_t* src, const RowLayout& to, uint8_t* dst, int n_rows) {
    check_same_channels(from, to);
    std::vector<float> values(static_cast<size_t>(from.width));
    for (int i = 0; i < n_rows; i++, src += from.row_bytes, dst += to.row_bytes) {
        read_row(from, src, values.data());
        write_row(to, values.data(), dst);
        for (int g = 0; g < to.n_groups; g++) {
            copy_unchanged_segments(from, from.groups[g], src, to, to.groups[g], dst);
        }
    }
}

bool has_format(const RowLayout& layout, bool (*of)(Format)) {
    if (layout.n_groups == 0) return false;
    const GroupLayout& last = layout.groups[layout.n_groups - 1];
    return std::any_of(layout.segments, layout.segments + last.first_segment + last.n_segments,
                       [of](const SegmentLayout& s) { return of(format_of(s)); });
}

bool in_blocks(const RowLayout& layout) { return has_format(layout, format_in_blocks); }

void write_block(const RowLayout& layout, const float* x, uint8_t* rows) {
    for (int g = 0; g < layout.n_groups; g++) {
        const GroupLayout& group = layout.groups[g];
        for (int s = group.first_segment; s < group.first_segment + group.n_segments; s++) {
            const SegmentLayout& segment = layout.segments[s];
            if (format_in_blocks(format_of(segment))) {
                with_block_format(format_of(segment), [&](auto f) {
                    decltype(f)::write(x + segment.column, layout.width, segment.width, rows + segment.offset,
                                       layout.row_bytes);
                });
                continue;
            }
            for (int i = 0; i < block_slots; i++) {
                write_segment(format_of(segment), x + int64_t{i} * layout.width + segment.column, segment.width,
                              rows + int64_t{i} * layout.row_bytes + segment.offset);
            }
        }
    }
}

void read_slot(const RowLayout& layout, const uint8_t* rows, int64_t slot, float* x) {
    const uint8_t* const row = rows + slot * layout.row_bytes;
    const uint8_t* const block = rows + slot / block_slots * block_slots * layout.row_bytes;
    for (int g = 0; g < layout.n_groups; g++) {
        const GroupLayout& group = layout.groups[g];
        for (int s = group.first_segment; s < group.first_segment + group.n_segments; s++) {
            const SegmentLayout& segment = layout.segments[s];
            if (format_in_blocks(format_of(segment))) {
                read_block_segment(format_of(segment), block + segment.offset, layout.row_bytes, row + segment.offset,
                                   segment.width, x + segment.column);
            } else {
                read_segment(format_of(segment), row + segment.offset, segment.width, x + segment.column);
            }
        }
        std::fill(x + group.column + group.kept, x + group.column + group.width, 0.0f);
    }
}

void move_block(const RowLayout& from, const uint8_t* const* src, const RowLayout& to, uint8_t* dst) {
    check_same_channels(from, to);
    std::vector<float> values(static_cast<size_t>(block_slots) * static_cast<size_t>(from.width));
    for (int i = 0; i < block_slots; i++) {
        read_row(from, src[i], &values[static_cast<size_t>(i) * static_cast<size_t>(from.width)]);
    }
    write_block(to, values.data(), dst);
    for (int g = 0; g < to.n_groups; g++) {
        for (int i = 0; i < block_slots; i++) {
            copy_unchanged_segments(from, from.groups[g], src[i], to, to.groups[g], dst + int64_t{i} * to.row_bytes);
        }
    }
}

}  // namespace lkv
