// A row is what one token leaves in one tensor (K or V) of one layer: groups of channels, each cut in segments, each
// segment in a format. A row is a list of segments, and in some formats a group begins with their scales (formats/normal.h): every path,
// rank, plan and region is one of these lists.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cache/pages.h"

namespace lkv {

enum class Format : int32_t;

struct SegmentLayout {
    int32_t format;  // a Format of cache/formats.h
    int32_t width;   // channels
    int32_t column;  // first channel, counted over the uncompressed vector of all groups
    int32_t offset;  // first byte in the row, a multiple of 4
    int32_t scales;  // likewise of its scales: its own first byte, or its group's (formats/normal.h)
};

struct GroupLayout {
    int32_t column;         // first channel in the uncompressed vector
    int32_t width;          // channels of the uncompressed vector (the rank in the file, or head_dim)
    int32_t kept;           // stored channels: the prefix before the trailing `none` segments
    int32_t first_segment;  // into RowLayout::segments
    int32_t n_segments;     // stored ones only
};

struct RowLayout {
    const SegmentLayout* segments;
    const GroupLayout* groups;
    int32_t n_groups;
    int32_t width;      // channels of the uncompressed vector, all groups
    int32_t row_bytes;  // a multiple of 4
};

struct SegmentSpec {
    Format format;
    int width;  // channels, a multiple of the format's width multiple
};

// Owns what a RowLayout points at. Segments follow each other in the row without gaps, groups in order. Neighbours of one group in one
// format that is scaled by its group become one segment.
class RowPlan {
public:
    RowPlan() = default;

    // groups[g] lists the segments of group g, most important channels first; `none` only at the end of a group.
    // Throws std::invalid_argument: "[row] expected …; got …".
    explicit RowPlan(const std::vector<std::vector<SegmentSpec>>& groups);

    // n_groups groups of one segment each.
    static RowPlan uniform(int n_groups, int width, Format format);

    // Valid as long as this plan lives and is not assigned to.
    RowLayout view() const;

    int row_bytes() const { return row_bytes_; }

private:
    void check_scales(Format format, const std::string& where) const;
    void append(Format format, int width, GroupLayout& group);

    std::vector<SegmentLayout> segments_;
    std::vector<GroupLayout> groups_;
    int width_ = 0;
    int row_bytes_ = 0;
};

// Whether a segment's format is one of those.
bool has_format(const RowLayout& layout, bool (*of)(Format));

// Whether groups begin with the scales of their segments.
bool has_group_scales(const RowLayout& layout);

// Whether both have the same segments in the same places.
bool same_layout(const RowLayout& a, const RowLayout& b);

// Whether a segment is stored in token blocks: then write_token_block and read_slot replace write_row and read_row, which throw
// std::invalid_argument.
bool in_token_blocks(const RowLayout& layout);

// x: [layout.width] -> row: [layout.row_bytes]. Dropped channels are not stored.
void write_row(const RowLayout& layout, const float* x, uint8_t* row);

// row: [layout.row_bytes] -> x: [layout.width]. Dropped channels read as zeros.
void read_row(const RowLayout& layout, const uint8_t* row, float* x);

// x: [32, layout.width] -> rows: [32, layout.row_bytes], those of a block's slots.
void write_token_block(const RowLayout& layout, const float* x, uint8_t* rows);

// Slot `slot` of a region, in token blocks or not. rows: [n_slots, layout.row_bytes] -> x: [layout.width].
void read_slot(const RowLayout& layout, const uint8_t* rows, int64_t slot, float* x);

// Requantizes n_rows consecutive rows from one layout into another: channels that `from` does not keep become zeros, channels that `to`
// does not keep are dropped. Both layouts have the same groups and widths. A segment that both store alike is copied bit
// for bit; where groups have the scales, that is a row which both store alike. Throws std::invalid_argument when the groups differ.
void move_rows(const RowLayout& from, const uint8_t* src, const RowLayout& to, uint8_t* dst, int n_rows = 1);

// The same for 32 rows wherever they lie, into a block. src: [32] rows, dst: [32, to.row_bytes].
void move_token_block(const RowLayout& from, const uint8_t* const* src, const RowLayout& to, uint8_t* dst);

// Rows of slots `from` go to slots `to` of the same region, all at once. rows: of slot 0, in pages. In token blocks `to` are whole
// blocks in their order, of which the last may have fewer: those that it lacks are free. Scales are chosen anew there, other segments keep
// their bytes.
void regroup_rows(const RowLayout& layout, uint8_t* rows, int64_t page_bytes, std::span<const int> from,
                  std::span<const int> to);

}  // namespace lkv
