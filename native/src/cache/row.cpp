#include "cache/row.h"

#include <algorithm>
#include <array>
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

// What segments add up to, in the order of a device, where 32 warps take turns (ops/cuda/rows/rows.cuh).
class SegmentSums {
public:
    void add(const LevelSums& of) {
        LevelSums& to = sums_[static_cast<size_t>(turn_++) % sums_.size()];
        to = {to.xl + of.xl, to.ll + of.ll};
    }
    LevelSums total() {
        for (size_t n = sums_.size() / 2; n > 0; n /= 2) {
            for (size_t i = 0; i < n; i++) {
                sums_[i] = {sums_[i].xl + sums_[i + n].xl, sums_[i].ll + sums_[i + n].ll};
            }
        }
        return sums_[0];
    }

private:
    std::array<LevelSums, row_strands> sums_{};
    int turn_ = 0;
};

// Calls f with a value of the type of every segment's format, all of which are scaled by their row.
template <class F>
void for_scaled(std::span<const SegmentLayout> segments, F&& f) {
    for (const SegmentLayout& s : segments) {
        with_format(format_of(s), [&](auto of) {
            if constexpr (is_scaled_by_row<decltype(of)>) f(of, s);
        });
    }
}

RowScales scales_of(std::span<const SegmentLayout> segments, const float* x) {
    bool has_middle = false;
    for_scaled(segments, [&](auto f, const SegmentLayout&) { has_middle = has_middle || fits_scale(f.bits, true); });
    SegmentSums powers;
    int n = 0;
    float reach = 0.0f;
    for_scaled(segments, [&](auto f, const SegmentLayout& s) {
        const bool fits = fits_scale(f.bits, has_middle);
        powers.add({fits ? power_of(x + s.column, s.width) : 0.0f, 0.0f});
        n += fits ? s.width : 0;
        if constexpr (!f.clips) reach = std::max(reach, f.reach(x + s.column, s.width));
    });
    RowScaleFit fit(powers.total().xl, n);
    for (int k = 0; k < RowScaleFit::n_refine; k++) {
        SegmentSums sums;
        const float inverse = fit.inverse();
        for_scaled(segments, [&](auto f, const SegmentLayout& s) {
            sums.add(fits_scale(f.bits, has_middle) ? f.sums(x + s.column, s.width, inverse) : LevelSums{});
        });
        fit.refine(sums.total());
    }
    return {fit.stored(), half_ceil(reach)};
}

void write_scaled_row(std::span<const SegmentLayout> segments, const float* x, uint8_t* row) {
    const RowScales scales = scales_of(segments, x);
    scales.store(row);
    for_scaled(segments, [&](auto f, const SegmentLayout& s) {
        f.write(x + s.column, s.width, scales.inverse(f.clips), row + s.offset);
    });
}

}  // namespace

bool has_format(const RowLayout& layout, bool (*of)(Format)) {
    if (layout.n_groups == 0) return false;
    return std::ranges::any_of(segments(layout), [of](const SegmentLayout& s) { return of(format_of(s)); });
}

bool has_row_scale(const RowLayout& layout) { return has_format(layout, format_scaled_by_row); }

bool same_layout(const RowLayout& a, const RowLayout& b) {
    const auto same_segment = [](const SegmentLayout& s, const SegmentLayout& t) {
        return s.format == t.format && s.width == t.width && s.offset == t.offset;
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
    if (has_row_scale(layout)) return write_scaled_row(segments(layout), x, row);
    for (const SegmentLayout& s : segments(layout)) {
        write_segment(format_of(s), x + s.column, s.width, row + s.offset);
    }
}

void read_row(const RowLayout& layout, const uint8_t* row, float* x) {
    for (const SegmentLayout& s : segments(layout)) read_segment(format_of(s), row, s.offset, s.width, x + s.column);
    for (int g = 0; g < layout.n_groups; g++) {
        const GroupLayout& group = layout.groups[g];
        std::fill(x + group.column + group.kept, x + group.column + group.width, 0.0f);
    }
}

}  // namespace lkv
