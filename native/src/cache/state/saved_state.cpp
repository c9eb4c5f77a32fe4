#include "cache/state/saved_state.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "cache/formats.h"

namespace lkv {
namespace {

// Bytes of a segment as wide as this, or as its format allows.
int bytes_of(const SegmentLayout& segment, int width) {
    const auto format = static_cast<Format>(segment.format);
    const int unit = format_width_multiple(format);
    return format_bytes(format, (width + unit - 1) / unit * unit);
}

// A sequence's rows in another layout: never coarser than those that this cache would have written.
void check_finer(const RowLayout& from, const RowLayout& to) {
    bool finer = !in_token_blocks(from) && !in_token_blocks(to);
    for (int g = 0; finer && g < to.n_groups; g++) {
        const GroupLayout& gf = from.groups[g];
        const GroupLayout& gt = to.groups[g];
        finer = gf.kept >= gt.kept;
        for (int s = 0, of = 0, done = 0; finer && done < gt.kept;) {  // channels that are a segment's in both
            const SegmentLayout& f = from.segments[gf.first_segment + of];
            const SegmentLayout& t = to.segments[gt.first_segment + s];
            const int from_end = f.column - gf.column + f.width;
            const int to_end = t.column - gt.column + t.width;
            const int end = std::min(from_end, to_end);
            finer = bytes_of(f, end - done) >= bytes_of(t, end - done);
            of += end == from_end ? 1 : 0;
            s += end == to_end ? 1 : 0;
            done = end;
        }
    }
    if (!finer) {
        fail("state",
             "expected rows of single tokens that are as fine as this session's or finer, segment by segment; got ",
             from.row_bytes, " bytes where this session has ", to.row_bytes, as_it_was_saved);
    }
}

}  // namespace

void put_name(ByteWriter& out, const std::string& name) {
    char bytes[name_bytes] = {};
    std::copy_n(name.data(), std::min(name.size(), name_bytes - 1), bytes);
    out.put(bytes, name_bytes);
}

std::string get_name(ByteReader& in) {
    const auto* const bytes = reinterpret_cast<const char*>(in.take(name_bytes));
    return {bytes, std::find(bytes, bytes + name_bytes, '\0')};
}

void put_layout(ByteWriter& out, const RowLayout& row) {
    out.put(static_cast<uint32_t>(row.n_groups));
    for (int g = 0; g < row.n_groups; g++) {
        const GroupLayout& group = row.groups[g];
        const int dropped = group.width - group.kept;
        out.put(static_cast<uint32_t>(group.n_segments + (dropped > 0 ? 1 : 0)));
        for (int s = group.first_segment; s < group.first_segment + group.n_segments; s++) {
            out.put(row.segments[s].format);
            out.put(row.segments[s].width);
        }
        if (dropped > 0) {
            out.put(static_cast<int32_t>(Format::none));
            out.put(static_cast<int32_t>(dropped));
        }
    }
}

RowPlan get_layout(ByteReader& in, const RowLayout& own) {
    const auto n_groups = in.get<uint32_t>();
    if (n_groups == 0) {
        return RowPlan(std::vector<std::vector<SegmentSpec>>());
    }
    expect_same("groups in a row", own.n_groups, n_groups);
    std::vector<std::vector<SegmentSpec>> groups;
    for (int g = 0; g < own.n_groups; g++) {
        const auto n_segments = in.get<uint32_t>();
        if (n_segments == 0 || n_segments > static_cast<uint32_t>(own.groups[g].width)) {
            fail("state", "expected 1 to ", own.groups[g].width, " segments in a group; got ", n_segments);
        }
        std::vector<SegmentSpec>& segments = groups.emplace_back();
        int64_t width = 0;
        for (uint32_t s = 0; s < n_segments; s++) {
            const auto format = in.get<int32_t>();
            const auto n = in.get<int32_t>();
            if (n < 1 || n > own.groups[g].width) {
                fail("state", "expected segments of 1 to ", own.groups[g].width, " channels; got ", n);
            }
            segments.push_back({static_cast<Format>(format), n});
            width += n;
        }
        expect_same("channels in a group", own.groups[g].width, width);
    }
    try {
        return RowPlan(groups);
    } catch (const std::invalid_argument& error) {
        fail("state", "expected a row's layout; got one that says: ", error.what());
    }
}

bool is_coded_anew(const RowLayout& from, const RowLayout& own, Accept accept) {
    if (same_layout(from, own)) return false;
    expect_same("groups in a row", own.n_groups, from.n_groups);
    if (accept == Accept::same) {
        expect_same("row bytes", own.row_bytes, from.row_bytes);
        fail("state", "expected the row layout of this session; got another of as many bytes", as_it_was_saved);
    }
    check_finer(from, own);
    return true;
}

void put_row(const RowLayout& from, const uint8_t* saved, const RowLayout& to, uint8_t* row) {
    if (same_layout(from, to)) {
        std::memcpy(row, saved, static_cast<size_t>(to.row_bytes));
    } else {
        const std::vector<uint8_t> aligned(saved, saved + from.row_bytes);
        move_rows(from, aligned.data(), to, row);
    }
}

void SavedRegion::read_tokens(ByteReader& in, uint32_t n_used, size_t row_bytes) {
    constexpr size_t head = sizeof(int32_t) * 2 + sizeof(uint64_t);
    stride = head + row_bytes;
    for (uint32_t i = 0; i < n_used; i++) {
        SavedToken token{};
        token.slot = in.get<int32_t>();
        token.pos = in.get<int32_t>();
        token.seq = in.get<uint64_t>();
        token.rows = in.take(row_bytes);
        tokens.push_back(token);
    }
}

}  // namespace lkv
