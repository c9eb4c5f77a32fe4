// Groups that begin with their scales: their bytes against a writer in double that is made from the text of cache/formats/normal.h, what they lose,
// how their segments merge, how they move.
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "cache/formats.h"
#include "cache/row.h"
#include "check.h"
#include "rows/plane_code.h"

namespace {

using lkv::Format;
using lkv::RowLayout;
using lkv::RowPlan;
using Groups = std::vector<std::vector<lkv::SegmentSpec>>;

struct Known {
    Format format;
    int n_bits;
    double
        lost;  // squared error of normal channels, of their variance (Max 1960, read further apart; n8 and n6 reach the largest of 256)
};

constexpr Known known[] = {{Format::n8, 8, 0.000053}, {Format::n6, 6, 0.00088}, {Format::n5, 5, 0.0035},
                           {Format::n4, 4, 0.01154},  {Format::n3, 3, 0.0374},  {Format::n2, 2, 0.1222},
                           {Format::n1, 1, 0.4048}};

const Known& known_of(int32_t format) {
    return *std::find_if(std::begin(known), std::end(known),
                         [=](const Known& k) { return k.format == static_cast<Format>(format); });
}

// Levels from their definition, in rising order.
std::vector<double> levels_of(int n_bits) {
    constexpr double steps[] = {0, 1.59375, 1.0, 0.5859375, 0.3359375, 0.1875, 0.1044921875, 0, 0.030761719};
    std::vector<double> levels;
    const int n = 1 << n_bits;
    for (int c = 0; c < n; c++) levels.push_back((c - (n - 1) / 2.0) * steps[n_bits]);
    return levels;
}

// How much further apart they are read.
double gain_of(int n_bits) {
    return n_bits == 1 ? 2.0 / 1.59375 : (n_bits == 2 ? 1.0625 : (n_bits == 3 ? 76.0 / 75.0 : 1.0));
}

int nearest(const std::vector<double>& levels, double y) {
    int best = 0;
    for (size_t c = 0; c < levels.size(); c++) {
        if (std::fabs(levels[c] - y) <= std::fabs(levels[static_cast<size_t>(best)] - y)) best = static_cast<int>(c);
    }
    return best;
}

template <class Visit>
void each_channel(const RowLayout& row, Visit visit) {
    for (int g = 0; g < row.n_groups; g++) {
        for (int s = row.groups[g].first_segment; s < row.groups[g].first_segment + row.groups[g].n_segments; s++) {
            for (int i = 0; i < row.segments[s].width; i++) visit(row.segments[s], i);
        }
    }
}

int scale_at(int n_bits) { return n_bits >= 6 ? 3 : (n_bits >= 3 ? 2 : n_bits - 1); }

// The scale at that byte of a group before its rounding.
double scale_in_double(const RowLayout& row, int scales, int at, const std::vector<float>& x) {
    std::vector<std::pair<double, int>> channels;  // value and bits
    double reach = 0.0;
    double power = 0.0;
    each_channel(row, [&](const lkv::SegmentLayout& s, int i) {
        const int bits = known_of(s.format).n_bits;
        const double value = double{x[static_cast<size_t>(s.column + i)]};
        if (s.scales != scales || scale_at(bits) != at) return;
        channels.emplace_back(value, bits);
        reach = std::max(reach, std::fabs(value) / levels_of(bits).back());
        power += value * value;
    });
    if (at == 3) return reach;
    double scale = channels.empty() ? 0.0 : std::sqrt(power / static_cast<double>(channels.size()));
    for (int k = 0; k < 2 && scale > 0.0; k++) {
        double xl = 0.0;
        double ll = 0.0;
        for (const auto& [value, bits] : channels) {
            const std::vector<double> levels = levels_of(bits);
            const double level = levels[static_cast<size_t>(nearest(levels, value / scale))];
            xl += value * level;
            ll += level * level;
        }
        if (xl > 0.0) scale = xl / ll;
    }
    return scale;
}

// A byte that is a scale: 5 bits of an exponent, 3 of a fraction.
double scale_of(uint8_t byte) {
    const int exponent = byte >> 3;
    const double fraction = (byte & 7) / 8.0;
    return exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1.0 + fraction, exponent - 15);
}

std::vector<uint8_t> written(const RowLayout& row, const std::vector<float>& x) {
    std::vector<uint8_t> bytes(static_cast<size_t>(row.row_bytes) + 8, 0xa5);
    lkv::write_row(row, x.data(), bytes.data());
    for (int i = 0; i < 8; i++) CHECK(bytes[static_cast<size_t>(row.row_bytes + i)] == 0xa5);
    return bytes;
}

std::vector<float> read(const RowLayout& row, const std::vector<uint8_t>& bytes) {
    std::vector<float> y(static_cast<size_t>(row.width), NAN);
    lkv::read_row(row, bytes.data(), y.data());
    return y;
}

std::vector<float> normals(std::mt19937& random, int n, float spread = 1.0f) {
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) v = normal(random);
    return x;
}

const Groups mixed = {{{Format::n8, 32}, {Format::n4, 48}, {Format::n1, 16}, {Format::none, 32}},
                      {{Format::n6, 16}, {Format::n5, 32}, {Format::n3, 16}, {Format::n2, 80}},
                      {{Format::none, 16}}};

void bytes_of_a_row() {
    std::mt19937 random(1);
    const RowPlan plan(mixed);
    const RowLayout row = plan.view();
    CHECK(row.row_bytes == 4 + 32 + 24 + 4 + 4 + 12 + 20 + 8 + 20 && lkv::has_group_scales(row));
    CHECK(row.segments[2].scales == 0 && row.segments[3].scales == 64 && row.segments[3].offset == 68);
    int ties = 0;
    for (int trial = 0; trial < 200; trial++) {
        const std::vector<float> x = normals(random, row.width, std::exp2(static_cast<float>(trial % 12 - 6)));
        const std::vector<uint8_t> bytes = written(row, x);
        for (const int scales : {0, 64}) {
            for (const int at : {0, 1, 2, 3}) {
                const uint8_t byte = bytes[static_cast<size_t>(scales + at)];
                const double want = scale_in_double(row, scales, at, x);
                if (at == 3) {
                    CHECK(want <= scale_of(byte) && want > scale_of(static_cast<uint8_t>(byte - 1)) * 0.9995);
                } else {
                    CHECK(std::fabs(scale_of(byte) - want) <=
                          (scale_of(static_cast<uint8_t>(byte + 1)) - scale_of(byte)) * 0.51);
                }
            }
        }
        const std::vector<float> y = read(row, bytes);
        each_channel(row, [&](const lkv::SegmentLayout& s, int i) {
            const auto at = static_cast<size_t>(s.column + i);
            const int n_bits = known_of(s.format).n_bits;
            const double scale = scale_of(bytes[static_cast<size_t>(s.scales + scale_at(n_bits))]);
            const std::vector<double> levels = levels_of(n_bits);
            const int code = lkv::test::plane_code(bytes, s.offset, n_bits, i);
            const int best = nearest(levels, double{x[at]} / scale);
            if (code != best) {  // as near in f32
                const double borders = (levels[static_cast<size_t>(code)] + levels[static_cast<size_t>(best)]) / 2;
                CHECK(std::fabs(double{x[at]} / scale - borders) < 2e-5);
                ties++;
            }
            const double read = scale * gain_of(n_bits) * levels[static_cast<size_t>(code)];
            CHECK(std::fabs(double{y[at]} - read) <= 2e-6 * scale * levels.back());
        });
        for (int c = 96; c < 128; c++) CHECK(y[static_cast<size_t>(c)] == 0.0f);
    }
    CHECK(ties < 5);
    // 16 channels of one bit are 2 bytes, and 2 of padding
    const RowPlan odd({{{Format::n1, 16}}, {{Format::n5, 16}}});
    CHECK(odd.row_bytes() == 4 + 4 + 4 + 12);
    const std::vector<uint8_t> bytes = written(odd.view(), normals(random, 32));
    for (const size_t zero : {1, 2, 3, 6, 7, 8, 9, 11, 22, 23}) CHECK(bytes[zero] == 0);  // scales of no segment, too
}

void errors() {
    std::mt19937 random(2);
    for (const Known& k : known) {
        const RowPlan plan = RowPlan::uniform(4, 256, k.format);
        double lost = 0.0;
        double power = 0.0;
        for (int trial = 0; trial < 200; trial++) {
            const std::vector<float> x = normals(random, 1024, 3.0f);
            const std::vector<float> y = read(plan.view(), written(plan.view(), x));
            for (size_t i = 0; i < x.size(); i++) {
                lost += (double{x[i]} - double{y[i]}) * (double{x[i]} - double{y[i]});
                power += double{x[i]} * double{x[i]};
            }
        }
        CHECK_MSG(std::fabs(lost / power / k.lost - 1.0) < 0.08,
                  std::string(lkv::format_name(k.format)) + " loses " + std::to_string(lost / power));
    }
}

void edges() {
    const RowPlan plan({{{Format::n4, 32}, {Format::n2, 32}, {Format::n1, 32}}});
    const RowLayout row = plan.view();
    for (const float value : {0.0f, -0.0f, 1e-42f, 1e-20f, -1e20f, 1e30f, -3e38f}) {
        for (const float first : {value, 0.0f, -value}) {
            std::vector<float> x(static_cast<size_t>(row.width), value);
            x[0] = first;
            for (const float y : read(row, written(row, x))) {
                CHECK(std::isfinite(y) && (std::fabs(value) > 1e-15f || std::fabs(y) < 1e-8f));
            }
        }
    }
    std::vector<float> ones(static_cast<size_t>(row.width), 1.0f);
    ones[5] = -1.0f;
    const std::vector<float> y = read(row, written(row, ones));
    CHECK(y[4] > 0.7f && y[4] < 1.4f && y[5] < -0.7f);
    // one channel alone
    std::vector<float> spike(static_cast<size_t>(row.width), 0.0f);
    spike[5] = 100.0f;
    CHECK(read(row, written(row, spike))[5] > 50.0f);
}

void merged_runs() {
    const Groups blocks = {{{Format::n4, 16}, {Format::n4, 16}, {Format::n1, 16}, {Format::n1, 16}, {Format::none, 16}},
                           {{Format::n1, 16}, {Format::n1, 32}}};
    const Groups runs = {{{Format::n4, 32}, {Format::n1, 32}, {Format::none, 16}}, {{Format::n1, 48}}};
    const RowPlan a(blocks);
    const RowPlan b(runs);
    CHECK(lkv::same_layout(a.view(), b.view()) && a.row_bytes() == 4 + 16 + 4 + 4 + 8);
    CHECK(a.view().groups[0].n_segments == 2 && a.view().groups[0].kept == 64 && a.view().groups[0].width == 80);
    CHECK(a.view().groups[1].first_segment == 2 && a.view().segments[2].column == 80);
    const RowPlan old({{{Format::q4, 16}, {Format::q4, 16}}});
    CHECK(old.view().groups[0].n_segments == 2 && !lkv::has_group_scales(old.view()));
    CHECK(RowPlan({{{Format::none, 16}}}).row_bytes() == 0);
    CHECK_THROWS(
        RowPlan({{{Format::n4, 16}}, {{Format::n4, 16}, {Format::q1, 16}}}),
        "[row] expected formats n8 … n1 throughout a row, or none of them; got n4 and q1 at group 1, segment 1");
    CHECK_THROWS(RowPlan({{{Format::f16, 16}, {Format::n8, 16}}}),
                 "none of them; got f16 and n8 at group 0, segment 1");
    CHECK_THROWS(RowPlan({{{Format::n4, 24}}}), "positive multiple of 16 for format n4; got 24");
    CHECK_THROWS(lkv::write_segment(Format::n4, nullptr, 16, nullptr),
                 "[format] expected a format with scales of its own; got n4");
}

void moves() {
    std::mt19937 random(3);
    const RowPlan wide({{{Format::n8, 64}}, {{Format::n8, 32}}});
    const RowPlan narrow({{{Format::n8, 32}, {Format::n2, 16}, {Format::none, 16}}, {{Format::n4, 32}}});
    const RowPlan exact({{{Format::f16, 64}}, {{Format::f16, 32}}});
    const std::vector<float> x = normals(random, 96);
    const std::vector<uint8_t> from = written(wide.view(), x);
    std::vector<uint8_t> same(static_cast<size_t>(wide.row_bytes()));
    lkv::move_rows(wide.view(), from.data(), wide.view(), same.data());
    CHECK(std::equal(same.begin(), same.end(), from.begin()));

    std::vector<uint8_t> to(static_cast<size_t>(narrow.row_bytes()));
    lkv::move_rows(wide.view(), from.data(), narrow.view(), to.data());
    const std::vector<float> between = read(wide.view(), from);
    const std::vector<uint8_t> anew = written(narrow.view(), between);
    CHECK(std::equal(to.begin(), to.end(), anew.begin()));  // with a scale of its own

    std::vector<uint8_t> up(static_cast<size_t>(exact.row_bytes()));
    lkv::move_rows(narrow.view(), to.data(), exact.view(), up.data());
    const std::vector<float> low = read(narrow.view(), to);
    const std::vector<float> high = read(exact.view(), up);
    for (size_t i = 0; i < low.size(); i++) CHECK(std::fabs(low[i] - high[i]) <= std::fabs(low[i]) / 2000);
    std::vector<uint8_t> back(static_cast<size_t>(narrow.row_bytes()));
    lkv::move_rows(exact.view(), up.data(), narrow.view(), back.data());
    CHECK(lkv::test::relative_error(read(narrow.view(), back), low) < 0.1);  // n2 is read further apart once more
}

}  // namespace

int main() {
    bytes_of_a_row();
    errors();
    edges();
    merged_runs();
    moves();
    return lkv::test::report("scaled row");
}
