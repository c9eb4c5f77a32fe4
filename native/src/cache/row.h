// A row is what one token leaves in one tensor (K or V) of one layer: groups of channels, each cut in segments, each
// segment in a format. A row is a list of segments, nothing else: every path, rank, plan and region is one of these lists.
#pragma once

#include <cstdint>

namespace lkv {

struct SegmentLayout {
    int32_t format;  // a Format of cache/formats.h
    int32_t width;   // channels
    int32_t column;  // first channel, counted over the uncompressed vector of all groups
    int32_t offset;  // first byte in the row
};

struct GroupLayout {
    int32_t column;         // first channel in the uncompressed vector
    int32_t width;          // channels of the uncompressed vector (the rank in the file, or head_dim)
    int32_t kept;           // stored channels: the prefix before the trailing `none` segments
    int32_t first_segment;  // into RowLayout::segments
    int32_t n_segments;     // stored ones only
};

struct RowLayout {
    const SegmentLayout * segments;
    const GroupLayout *   groups;
    int32_t               n_groups;
    int32_t               width;      // channels of the uncompressed vector, all groups
    int32_t               row_bytes;  // a multiple of 4
};

}  // namespace lkv
