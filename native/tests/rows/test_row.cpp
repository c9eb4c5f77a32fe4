// Row layouts: offsets, dropped channels, groups, demotion, refusals.
#include "cache/row.h"

#include <algorithm>
#include <random>
#include <vector>

#include "cache/formats.h"
#include "check.h"

namespace {

using lkv::Format;
using lkv::RowPlan;
using lkv::SegmentSpec;

std::vector<float> gaussian(int n, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) v = normal(random);
    return x;
}

const std::vector<std::vector<SegmentSpec>> mixed = {
    {{Format::f16, 16}, {Format::q4, 48}, {Format::none, 32}},
    {{Format::q8_0, 32}},
    {{Format::q3, 16}, {Format::none, 16}, {Format::none, 16}},
    {{Format::none, 16}},
};

void layout() {
    const RowPlan plan(mixed);
    const lkv::RowLayout row = plan.view();
    CHECK(row.n_groups == 4 && row.width == 96 + 32 + 48 + 16);
    int offset = 0;
    for (int g = 0, s = 0; g < row.n_groups; g++) {
        CHECK(row.groups[g].first_segment == s);
        int column = row.groups[g].column;
        for (int i = 0; i < row.groups[g].n_segments; i++, s++) {
            CHECK(row.segments[s].offset == offset && offset % 4 == 0);
            CHECK(row.segments[s].column == column);
            column += row.segments[s].width;
            offset += lkv::format_bytes(static_cast<Format>(row.segments[s].format), row.segments[s].width);
        }
        CHECK(column - row.groups[g].column == row.groups[g].kept);
    }
    CHECK(row.row_bytes == offset && plan.row_bytes() == offset);
    CHECK(row.groups[0].kept == 64 && row.groups[0].width == 96 && row.groups[2].kept == 16 && row.groups[3].kept == 0);

    const lkv::RowLayout heads = RowPlan::uniform(3, 64, Format::q4_0).view();
    CHECK(heads.n_groups == 3 && heads.row_bytes == 3 * 36);
}

void round_trip() {
    const RowPlan plan(mixed);
    const lkv::RowLayout row = plan.view();
    constexpr int n_rows = 5;
    constexpr int stride_slack = 12;
    const int64_t stride = row.row_bytes + stride_slack;
    std::vector<uint8_t> rows(static_cast<size_t>(n_rows * stride), 0xee);
    for (int i = 0; i < n_rows; i++) {
        const std::vector<float> x = gaussian(row.width, static_cast<unsigned>(i));
        uint8_t* at = &rows[static_cast<size_t>(i * stride)];
        lkv::write_row(row, x.data(), at);
        for (int k = 0; k < stride_slack; k++) CHECK(at[row.row_bytes + k] == 0xee);
        std::vector<float> y(x.size(), NAN);
        lkv::read_row(row, at, y.data());
        for (int g = 0; g < row.n_groups; g++) {
            const lkv::GroupLayout& group = row.groups[g];
            for (int c = 0; c < group.width; c++) {
                const float got = y[static_cast<size_t>(group.column + c)];
                const float want = x[static_cast<size_t>(group.column + c)];
                CHECK(c < group.kept ? std::fabs(got - want) < (g == 2 ? 0.6f : 0.25f) : got == 0.0f);
            }
        }
    }
}

void demotion() {
    const RowPlan exact({{{Format::f16, 32}, {Format::q8, 32}, {Format::f16, 16}}, {{Format::f16, 32}}});
    const RowPlan lower({{{Format::q4, 32}, {Format::q8, 32}, {Format::none, 16}}, {{Format::f16, 32}}});
    const lkv::RowLayout from = exact.view();
    const lkv::RowLayout to = lower.view();
    constexpr int n_rows = 3;
    std::vector<uint8_t> src(static_cast<size_t>(n_rows * from.row_bytes));
    std::vector<uint8_t> dst(static_cast<size_t>(n_rows * to.row_bytes) + 4, 0xee);
    for (int i = 0; i < n_rows; i++)
        lkv::write_row(from, gaussian(from.width, static_cast<unsigned>(i)).data(),
                       &src[static_cast<size_t>(i * from.row_bytes)]);
    lkv::move_rows(from, src.data(), to, dst.data(), n_rows);
    for (size_t i = dst.size() - 4; i < dst.size(); i++) CHECK(dst[i] == 0xee);
    for (int i = 0; i < n_rows; i++) {
        std::vector<float> x(static_cast<size_t>(from.width));
        lkv::read_row(from, &src[static_cast<size_t>(i * from.row_bytes)], x.data());
        std::vector<uint8_t> want(static_cast<size_t>(to.row_bytes));
        lkv::write_row(to, x.data(), want.data());
        const uint8_t* got = &dst[static_cast<size_t>(i * to.row_bytes)];
        CHECK(std::equal(got, got + to.segments[1].offset, want.begin()));  // requantized
        const lkv::SegmentLayout& q8 = to.segments[1];                      // unchanged: the same bytes
        CHECK(std::equal(
            got + q8.offset, got + to.row_bytes,
            &src[static_cast<size_t>(i * from.row_bytes + from.segments[1].offset)],
            [&, n = 0](uint8_t a, uint8_t b) mutable { return n++ >= lkv::format_bytes(Format::q8, 32) || a == b; }));
        std::vector<float> y(static_cast<size_t>(to.width));
        lkv::read_row(to, got, y.data());
        for (int c = 64; c < 80; c++) CHECK(y[static_cast<size_t>(c)] == 0.0f);
        for (int c = 80; c < 112; c++) CHECK(y[static_cast<size_t>(c)] == x[static_cast<size_t>(c)]);
    }
    // Upwards: channels that were dropped come back as zeros.
    std::vector<uint8_t> up(static_cast<size_t>(from.row_bytes));
    lkv::move_rows(to, dst.data(), from, up.data());
    std::vector<float> y(static_cast<size_t>(from.width), NAN);
    lkv::read_row(from, up.data(), y.data());
    for (int c = 64; c < 80; c++) CHECK(y[static_cast<size_t>(c)] == 0.0f);

    const RowPlan other({{{Format::f16, 64}, {Format::f16, 32}}, {{Format::f16, 16}}});
    CHECK_THROWS(lkv::move_rows(from, src.data(), other.view(), dst.data()),
                 "[row] expected 80 channels in group 0 of both layouts; got 96");
    CHECK_THROWS(lkv::move_rows(from, src.data(), RowPlan::uniform(1, 16, Format::f16).view(), dst.data()),
                 "[row] expected 2 groups of 112 channels in both layouts; got 1 groups of 16");
}

void refusals() {
    CHECK_THROWS(
        RowPlan({{{Format::q4, 20}}}),
        "[row] expected a segment width that is a positive multiple of 16 for format q4; got 20 at group 0, segment 0");
    CHECK_THROWS(RowPlan({{{Format::q8_0, 48}}}), "positive multiple of 32 for format q8_0; got 48");
    CHECK_THROWS(RowPlan({{{Format::f16, 0}}}), "positive multiple of 1 for format f16; got 0");
    CHECK_THROWS(RowPlan({{{Format::f16, 16}}, {{Format::none, 16}, {Format::q4, 16}}}),
                 "[row] expected none segments only at the end of a group; got q4 after none at group 1, segment 1");
    CHECK_THROWS(RowPlan({{{static_cast<Format>(99), 16}}}),
                 "[row] expected the number of a row format that this version has; got 99");
    CHECK_THROWS(RowPlan({{{Format::f16, 16}}, {{static_cast<Format>(12), 16}}}),
                 "[row] expected the number of a row format that this version has; got 12 at group 1, segment 0");
    CHECK_THROWS(RowPlan(std::vector<std::vector<SegmentSpec>>(1)),
                 "[row] expected at least one segment in each group; got none at group 0");
}

}  // namespace

int main() {
    layout();
    round_trip();
    demotion();
    refusals();
    return lkv::test::report("row");
}
