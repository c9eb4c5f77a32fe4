// Layouts of rows from lists of segments, or a refusal of lists that make none.
#include <stdexcept>
#include <string>

#include "cache/formats.h"
#include "cache/row.h"

namespace lkv {

namespace {

std::string at(size_t group, size_t segment) {
    return " at group " + std::to_string(group) + ", segment " + std::to_string(segment);
}

[[noreturn]] void refuse(const std::string& expected, const std::string& got) {
    throw std::invalid_argument("[row] expected " + expected + "; got " + got);
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
                check_scales(format, at(g, s));
                append(format, width, group);
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

// Groups have the scales, or each segment its own.
void RowPlan::check_scales(Format format, const std::string& where) const {
    if (segments_.empty()) return;
    const auto first = static_cast<Format>(segments_.front().format);
    if (format_scaled_by_group(first) != format_scaled_by_group(format)) {
        refuse("formats n8 … n1 throughout a row, or none of them",
               std::string(format_name(first)) + " and " + format_name(format) + where);
    }
}

void RowPlan::append(Format format, int width, GroupLayout& group) {
    group.kept += width;
    int scales = row_bytes_;
    if (format_scaled_by_group(format)) {
        if (group.n_segments == 0) {
            row_bytes_ += group_scale_bytes;
        } else {
            SegmentLayout& last = segments_.back();
            if (last.format == static_cast<int32_t>(format)) {
                last.width += width;
                row_bytes_ = last.offset + format_bytes(format, last.width);
                return;
            }
            scales = last.scales;
        }
    }
    segments_.push_back({static_cast<int32_t>(format), width, width_, row_bytes_, scales});
    row_bytes_ += format_bytes(format, width);
    group.n_segments++;
}

RowPlan RowPlan::uniform(int n_groups, int width, Format format) {
    return RowPlan(std::vector<std::vector<SegmentSpec>>(static_cast<size_t>(n_groups), {{format, width}}));
}

RowLayout RowPlan::view() const {
    return {segments_.data(), groups_.data(), static_cast<int32_t>(groups_.size()), width_, row_bytes_};
}

}  // namespace lkv
