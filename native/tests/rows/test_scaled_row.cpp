// Rows that begin with their scales: their bytes against a writer in double that is made from the text of cache/formats/normal.h, what they lose,
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
    double lost;  // squared error of normal channels, of their variance (Max 1960; n8 and n6 reach the largest of 1024)
};

constexpr Known known[] = {{Format::n8, 8, 0.00006}, {Format::n6, 6, 0.00102}, {Format::n5, 5, 0.0035},
                           {Format::n4, 4, 0.01154}, {Format::n3, 3, 0.0374},  {Format::n2, 2, 0.1188},
                           {Format::n1, 1, 0.3634}};

const Known& known_of(int32_t format) {
    return *std::find_if(std::begin(known), std::end(known),
                         [=](const Known& k) { return k.format == static_cast<Format>(format); });
}

// Levels from their definition, in rising order.
std::vector<double> levels_of(int n_bits) {
    constexpr double steps[] = {0, 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0, 0.0308};
    std::vector<double> levels;
    const int n = 1 << n_bits;
    for (int c = 0; c < n; c++) levels.push_back((c - (n - 1) / 2.0) * steps[n_bits]);
    return levels;
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

// The scale of n5 … n1 before its rounding.
double scale_in_double(const RowLayout& row, const std::vector<float>& x) {
    double power = 0.0;
    int n = 0;
    bool has_middle = false;
    each_channel(row, [&](const lkv::SegmentLayout& s, int) {
        const int bits = known_of(s.format).n_bits;
        has_middle = has_middle || (bits >= 3 && bits <= 5);
    });
    const auto counts = [&](const lkv::SegmentLayout& s) {
        const int bits = known_of(s.format).n_bits;
        return bits <= 5 && (bits >= 3) == has_middle;
    };
    const auto at = [&](const lkv::SegmentLayout& s, int i) { return double{x[static_cast<size_t>(s.column + i)]}; };
    each_channel(row, [&](const lkv::SegmentLayout& s, int i) {
        if (!counts(s)) return;
        power += at(s, i) * at(s, i);
        n++;
    });
    if (n == 0) return 0.0;
    double scale = std::sqrt(power / n);
    for (int k = 0; k < 2 && scale > 0.0; k++) {
        double xl = 0.0;
        double ll = 0.0;
        each_channel(row, [&](const lkv::SegmentLayout& s, int i) {
            if (!counts(s)) return;
            const std::vector<double> levels = levels_of(known_of(s.format).n_bits);
            const double level = levels[static_cast<size_t>(nearest(levels, at(s, i) / scale))];
            xl += at(s, i) * level;
            ll += level * level;
        });
        if (xl > 0.0) scale = xl / ll;
    }
    return scale;
}

// The same of n8 and n6: what reaches every value of theirs.
double reach_in_double(const RowLayout& row, const std::vector<float>& x) {
    double reach = 0.0;
    each_channel(row, [&](const lkv::SegmentLayout& s, int i) {
        const int bits = known_of(s.format).n_bits;
        if (bits < 6) return;
        reach = std::max(reach, std::fabs(double{x[static_cast<size_t>(s.column + i)]}) / levels_of(bits).back());
    });
    return reach;
}

double half(unsigned h) { return double{lkv::half_to_float(static_cast<uint16_t>(h))}; }

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
    CHECK(row.row_bytes == 4 + 32 + 24 + 4 + 12 + 20 + 8 + 20 && lkv::has_row_scale(row));
    int ties = 0;
    for (int trial = 0; trial < 200; trial++) {
        const std::vector<float> x = normals(random, row.width, std::exp2(static_cast<float>(trial % 12 - 6)));
        const std::vector<uint8_t> bytes = written(row, x);
        const double clipping = half(lkv::test::u16(bytes, 0));
        const double want = scale_in_double(row, x);
        CHECK(std::fabs(clipping - want) <= want / 2000);
        const double whole = half(lkv::test::u16(bytes, 2));
        const double reach = reach_in_double(row, x);
        CHECK(whole >= reach * 0.999999 && whole <= reach * 1.001);
        const std::vector<float> y = read(row, bytes);
        each_channel(row, [&](const lkv::SegmentLayout& s, int i) {
            const auto at = static_cast<size_t>(s.column + i);
            const int n_bits = known_of(s.format).n_bits;
            const double scale = n_bits >= 6 ? whole : clipping;
            const std::vector<double> levels = levels_of(n_bits);
            const int code = lkv::test::plane_code(bytes, s.offset, n_bits, i);
            const int best = nearest(levels, double{x[at]} / scale);
            if (code != best) {  // as near in f32
                const double borders = (levels[static_cast<size_t>(code)] + levels[static_cast<size_t>(best)]) / 2;
                CHECK(std::fabs(double{x[at]} / scale - borders) < 2e-5);
                ties++;
            }
            CHECK(std::fabs(double{y[at]} - scale * levels[static_cast<size_t>(code)]) <= 2e-6 * scale * levels.back());
        });
        for (int c = 96; c < 128; c++) CHECK(y[static_cast<size_t>(c)] == 0.0f);
    }
    CHECK(ties < 5);
    // 16 channels of one bit are 2 bytes, and 2 of padding
    const RowPlan odd({{{Format::n1, 16}}, {{Format::n5, 16}}});
    CHECK(odd.row_bytes() == 4 + 4 + 12);
    const std::vector<uint8_t> bytes = written(odd.view(), normals(random, 32));
    CHECK(bytes[6] == 0 && bytes[7] == 0 && bytes[18] == 0 && bytes[19] == 0);
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
    CHECK(lkv::same_layout(a.view(), b.view()) && a.row_bytes() == 4 + 16 + 4 + 8);
    CHECK(a.view().groups[0].n_segments == 2 && a.view().groups[0].kept == 64 && a.view().groups[0].width == 80);
    CHECK(a.view().groups[1].first_segment == 2 && a.view().segments[2].column == 80);
    const RowPlan old({{{Format::q4, 16}, {Format::q4, 16}}});
    CHECK(old.view().groups[0].n_segments == 2 && !lkv::has_row_scale(old.view()));
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
    CHECK(lkv::test::relative_error(read(narrow.view(), back), low) < 1e-2);
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
