// Rows in token blocks, and rows that move from one layout into another.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "cache/formats.h"
#include "cache/row.h"

namespace lkv {

namespace {

Format format_of(const SegmentLayout& s) { return static_cast<Format>(s.format); }

[[noreturn]] void refuse(const std::string& expected, const std::string& got) {
    throw std::invalid_argument("[row] expected " + expected + "; got " + got);
}

// Quantizing what was just dequantized may move a code: segments that both layouts store alike keep their bytes. Codes of another
// group's scales mean other values.
void copy_unchanged_segments(const RowLayout& from, const GroupLayout& a, const uint8_t* src, const RowLayout& to,
                             const GroupLayout& b, uint8_t* dst) {
    for (int i = 0; i < std::min(a.n_segments, b.n_segments); i++) {
        const SegmentLayout& s = from.segments[a.first_segment + i];
        const SegmentLayout& d = to.segments[b.first_segment + i];
        if (s.format == d.format && s.width == d.width && s.column == d.column &&
            !format_in_token_blocks(format_of(d)) && !format_scaled_by_group(format_of(d))) {
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

void write_token_block(const RowLayout& layout, const float* x, uint8_t* rows) {
    for (int g = 0; g < layout.n_groups; g++) {
        const GroupLayout& group = layout.groups[g];
        for (int s = group.first_segment; s < group.first_segment + group.n_segments; s++) {
            const SegmentLayout& segment = layout.segments[s];
            if (format_in_token_blocks(format_of(segment))) {
                with_token_block_format(format_of(segment), [&](auto f) {
                    decltype(f)::write(x + segment.column, layout.width, segment.width, rows + segment.offset,
                                       layout.row_bytes);
                });
                continue;
            }
            for (int i = 0; i < token_block_slots; i++) {
                write_segment(format_of(segment), x + int64_t{i} * layout.width + segment.column, segment.width,
                              rows + int64_t{i} * layout.row_bytes + segment.offset);
            }
        }
    }
}

void read_slot(const RowLayout& layout, const uint8_t* rows, int64_t slot, float* x) {
    const uint8_t* const row = rows + slot * layout.row_bytes;
    const uint8_t* const block = rows + slot / token_block_slots * token_block_slots * layout.row_bytes;
    for (int g = 0; g < layout.n_groups; g++) {
        const GroupLayout& group = layout.groups[g];
        for (int s = group.first_segment; s < group.first_segment + group.n_segments; s++) {
            const SegmentLayout& segment = layout.segments[s];
            if (format_in_token_blocks(format_of(segment))) {
                read_token_block_segment(format_of(segment), block + segment.offset, layout.row_bytes,
                                         row + segment.offset, segment.width, x + segment.column);
            } else {
                read_segment(format_of(segment), row + segment.offset, row + segment.scales, segment.width,
                             x + segment.column);
            }
        }
        std::fill(x + group.column + group.kept, x + group.column + group.width, 0.0f);
    }
}

void move_rows(const RowLayout& from, const uint8_t* src, const RowLayout& to, uint8_t* dst, int n_rows) {
    check_same_channels(from, to);
    if (has_group_scales(to) && same_layout(from, to)) {
        std::copy_n(src, static_cast<size_t>(n_rows) * static_cast<size_t>(to.row_bytes), dst);
        return;
    }
    std::vector<float> values(static_cast<size_t>(from.width));
    for (int i = 0; i < n_rows; i++, src += from.row_bytes, dst += to.row_bytes) {
        read_row(from, src, values.data());
        write_row(to, values.data(), dst);
        for (int g = 0; g < to.n_groups; g++) {
            copy_unchanged_segments(from, from.groups[g], src, to, to.groups[g], dst);
        }
    }
}

void move_token_block(const RowLayout& from, const uint8_t* const* src, const RowLayout& to, uint8_t* dst) {
    check_same_channels(from, to);
    std::vector<float> values(static_cast<size_t>(token_block_slots) * static_cast<size_t>(from.width));
    for (int i = 0; i < token_block_slots; i++) {
        read_row(from, src[i], &values[static_cast<size_t>(i) * static_cast<size_t>(from.width)]);
    }
    write_token_block(to, values.data(), dst);
    for (int g = 0; g < to.n_groups; g++) {
        for (int i = 0; i < token_block_slots; i++) {
            copy_unchanged_segments(from, from.groups[g], src[i], to, to.groups[g], dst + int64_t{i} * to.row_bytes);
        }
    }
}

void regroup_rows(const RowLayout& layout, uint8_t* rows, int64_t page_bytes, std::span<const int> from,
                  std::span<const int> to) {
    const auto row_bytes = static_cast<size_t>(layout.row_bytes);
    const auto at = [&](int slot) { return rows + row_offset(slot, page_bytes, layout.row_bytes); };
    std::vector<uint8_t> before(from.size() * row_bytes);
    for (size_t i = 0; i < from.size(); i++) std::copy_n(at(from[i]), row_bytes, &before[i * row_bytes]);
    if (!in_token_blocks(layout)) {
        for (size_t i = 0; i < to.size(); i++) std::copy_n(&before[i * row_bytes], row_bytes, at(to[i]));
        return;
    }
    constexpr auto block = static_cast<size_t>(token_block_slots);
    const auto width = static_cast<size_t>(layout.width);
    std::vector<float> values((from.size() + block - 1) / block * block * width);
    for (size_t i = 0; i < from.size(); i++) {
        const int in_block = from[i] % token_block_slots;
        read_slot(layout, at(from[i] - in_block), in_block, &values[i * width]);
    }
    for (size_t i = from.size(); i < values.size() / width; i++) {  // widens no channel's range
        std::copy_n(&values[(from.size() - 1) * width], width, &values[i * width]);
    }
    for (size_t first = 0; first < to.size(); first += block) {
        write_token_block(layout, &values[first * width], at(to[first]));
    }
    for (size_t i = 0; i < to.size(); i++) {
        for (int g = 0; g < layout.n_groups; g++) {
            copy_unchanged_segments(layout, layout.groups[g], &before[i * row_bytes], layout, layout.groups[g],
                                    at(to[i]));
        }
    }
}

}  // namespace lkv
