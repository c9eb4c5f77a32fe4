// Half precision, the byte maps of the formats against a reader written from their text, and the error that a written
// segment may have.
#include <algorithm>
#include <bit>
#include <limits>
#include <random>
#include <vector>

#include "cache/formats.h"
#include "check.h"
#include "rows/plane_code.h"
#ifdef LATENTKV_TEST_GGML
#include "ggml.h"
#endif

namespace {

using lkv::Format;

// IEEE 754 binary16, from the definition.
double half_value(unsigned h) {
    const double sign = h & 0x8000 ? -1.0 : 1.0;
    const int exponent = static_cast<int>(h >> 10 & 31);
    const double fraction = static_cast<double>(h & 1023) / 1024.0;
    if (exponent == 31) return h & 1023 ? NAN : sign * INFINITY;
    return exponent == 0 ? sign * std::ldexp(fraction, -14) : sign * std::ldexp(1.0 + fraction, exponent - 15);
}

void halves() {
    for (unsigned h = 0; h < 65536; h++) {
        const auto bits = static_cast<uint16_t>(h);
        const double want = half_value(h);
        const float got = lkv::half_to_float(bits);
        CHECK(std::isnan(want) ? std::isnan(got) : double{got} == want);
        if (std::isfinite(want)) CHECK(lkv::half_from_float(got) == bits);
    }
    std::mt19937 random(1);
    std::uniform_real_distribution<float> exponent(-28.0f, 16.5f);
    for (int i = 0; i < 200000; i++) {
        const float x = std::exp2(exponent(random)) * (i % 2 ? 1.0f : -1.0f);
        const double nearest = half_value(lkv::half_saturate(x));
        const double low = half_value(lkv::half_floor(x));
        const double high = half_value(lkv::half_ceil(x));
        if (std::fabs(x) <= lkv::half_max) {
            CHECK(low <= x && x <= high);
            CHECK(std::fabs(nearest - x) <= std::min(x - low, high - x));
            CHECK(low == high || lkv::half_floor(static_cast<float>(high)) == lkv::half_ceil(static_cast<float>(high)));
        } else {
            CHECK(std::fabs(nearest) == 65504.0 && std::fabs(low) == 65504.0 && std::fabs(high) == 65504.0);
        }
    }
    CHECK(lkv::half_floor(-1e-9f) == 0x8001 && lkv::half_ceil(1e-9f) == 0x0001);
    CHECK(lkv::half_saturate(INFINITY) == 0x7bff && lkv::half_saturate(-INFINITY) == 0xfbff);
}

using lkv::test::bits;
using lkv::test::plane_code;
using lkv::test::u16;

struct Known {
    Format format;
    char
        family;  // 'F' f32, 'f' f16, 'b' bf16, 'q' scale and minimum, '8' q8_0, '4' q4_0, '5' q5_0, 'm' q4_1 and q5_1, 'n' iq4_nl
    int n_bits;
};

constexpr Known known[] = {
    {Format::f32, 'F', 32}, {Format::f16, 'f', 16}, {Format::q8, 'q', 8},   {Format::q6, 'q', 6},
    {Format::q5, 'q', 5},   {Format::q4, 'q', 4},   {Format::q3, 'q', 3},   {Format::q2, 'q', 2},
    {Format::q1, 'q', 1},   {Format::q8_0, '8', 8}, {Format::q4_0, '4', 4}, {Format::bf16, 'b', 16},
    {Format::q4_1, 'm', 4}, {Format::q5_0, '5', 5}, {Format::q5_1, 'm', 5}, {Format::iq4_nl, 'n', 4},
};

// A code of ggml's blocks of 32, `n` bytes each: nibbles from byte `at` on, fifth bits in the word before them.
int block_code(const std::vector<uint8_t>& b, int n, int at, bool fifth, int i) {
    const int code = bits(b, i / 32 * n + at + i % 16, i % 32 / 16 * 4, 4);
    return fifth ? code | bits(b, i / 32 * n + at - 4 + i % 32 / 8, i % 8, 1) << 4 : code;
}

constexpr int iq4_nl_levels[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

double slow_value(const Known& f, const std::vector<uint8_t>& b, int i) {
    switch (f.family) {
        case 'F':
            return double{std::bit_cast<float>(u16(b, 4 * i) | u16(b, 4 * i + 2) << 16)};
        case 'f':
            return half_value(u16(b, 2 * i));
        case 'b':
            return double{std::bit_cast<float>(static_cast<uint32_t>(u16(b, 2 * i)) << 16)};
        case 'm': {
            const int n = f.n_bits == 5 ? 24 : 20;
            return block_code(b, n, n - 16, f.n_bits == 5, i) * half_value(u16(b, i / 32 * n)) +
                   half_value(u16(b, i / 32 * n + 2));
        }
        case '5':
            return (block_code(b, 22, 6, true, i) - 16) * half_value(u16(b, i / 32 * 22));
        case 'n':
            return iq4_nl_levels[block_code(b, 18, 2, false, i)] * half_value(u16(b, i / 32 * 18));
        case 'q':
            return plane_code(b, 4, f.n_bits, i) * half_value(u16(b, 0)) + half_value(u16(b, 2));
        case '8':
            return static_cast<int8_t>(b[static_cast<size_t>(i / 32 * 34 + 2 + i % 32)]) *
                   half_value(u16(b, i / 32 * 34));
        default:
            return (bits(b, i / 32 * 18 + 2 + i % 16, i % 32 / 16 * 4, 4) - 8) * half_value(u16(b, i / 32 * 18));
    }
}

int slow_bytes(const Known& f, int width) {
    double n = 0;
    switch (f.family) {
        case 'F':
            n = 4.0 * width;
            break;
        case 'f':
        case 'b':
            n = 2.0 * width;
            break;
        case 'm':
            n = width / 32.0 * (f.n_bits == 5 ? 24 : 20);
            break;
        case '5':
            n = width / 32.0 * 22;
            break;
        case 'q':
            n = 4.0 + width * f.n_bits / 8.0;
            break;
        case '8':
            n = width / 32.0 * 34;
            break;
        default:
            n = width / 32.0 * 18;
    }
    return static_cast<int>(std::ceil(n / 4.0)) * 4;
}

// Writes x, checks that both readers agree on the bytes, returns the values.
std::vector<float> round_trip(const Known& f, const std::vector<float>& x) {
    const int width = static_cast<int>(x.size());
    const int n_bytes = lkv::format_bytes(f.format, width);
    constexpr uint8_t guard = 0xa5;
    std::vector<uint8_t> bytes(static_cast<size_t>(n_bytes) + 8, guard);
    lkv::write_segment(f.format, x.data(), width, bytes.data());
    for (int i = 0; i < 8; i++) CHECK(bytes[static_cast<size_t>(n_bytes + i)] == guard);
    std::vector<float> y(x.size(), NAN);
    lkv::read_segment(f.format, bytes.data(), width, y.data());
    for (int i = 0; i < width; i++) {
        const double want = slow_value(f, bytes, i);
        const double got = double{y[static_cast<size_t>(i)]};
        // One fused rounding of code·scale + offset.
        CHECK_MSG(std::fabs(got - want) <= 1e-6 * (std::fabs(want) + 256 * half_value(u16(bytes, 0) & 0x7fff)),
                  std::string(lkv::format_name(f.format)) + " channel " + std::to_string(i) + ": expected " +
                      std::to_string(want) + "; got " + std::to_string(got));
    }
    return y;
}

std::vector<float> gaussian(std::mt19937& random, int n, float deviation, float mean) {
    std::normal_distribution<float> normal(mean, deviation);
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) v = normal(random);
    return x;
}

double span(const std::vector<float>& x) {
    return double{*std::max_element(x.begin(), x.end())} - double{*std::min_element(x.begin(), x.end())};
}

double squared_error(const std::vector<float>& x, const std::vector<float>& y) {
    double e = 0.0;
    for (size_t i = 0; i < x.size(); i++) e += (double{x[i]} - double{y[i]}) * (double{x[i]} - double{y[i]});
    return e;
}

// The largest error of a channel, in units of what the format promises.
void error_bounds() {
    std::mt19937 random(2);
    for (const Known& f : known) {
        const int multiple = lkv::format_width_multiple(f.format);
        for (int width : {32, 64, 96, 320}) {
            CHECK(width % multiple == 0);
            CHECK(lkv::format_bytes(f.format, width) == slow_bytes(f, width));
            for (const float mean : {0.0f, 3.0f, -100.0f}) {
                const std::vector<float> x = gaussian(random, width, 1.0f, mean);
                const std::vector<float> y = round_trip(f, x);
                const double peak = double{*std::max_element(
                    x.begin(), x.end(), [](float a, float b) { return std::fabs(a) < std::fabs(b); })};
                double bound = 0.0;
                switch (f.family) {
                    case 'F':
                        break;
                    case 'f':
                        bound = std::fabs(peak) / 2048;
                        break;
                    case 'b':
                        bound = std::fabs(peak) / 256;
                        break;
                    case 'm':
                        bound = span(x) / ((1 << f.n_bits) - 1) * 0.5 + (std::fabs(peak) + span(x)) / 2048;
                        break;
                    case '5':
                        bound = std::fabs(peak) / 16 * 1.001 + 1e-6;
                        break;
                    case 'n':  // half of the widest gap, and what the fitted scale leaves beyond the ends
                        bound = std::fabs(peak) * 0.2;
                        break;
                    // Half a step; the step and the minimum are f16, so the span grows by up to |minimum| / 1024.
                    case 'q':
                        bound = (span(x) + std::fabs(peak) / 1024) / ((1 << f.n_bits) - 1) * 0.502;
                        break;
                    case '8':
                        bound = std::fabs(peak) / 127 * 0.5 + std::fabs(peak) / 2048;
                        break;
                    case '4':
                        bound = std::fabs(peak) / 8 * 1.001 + 1e-6;
                        break;
                    default:
                        bound = std::fabs(peak) / ((1 << f.n_bits) - 1) * 1.001;
                }
                if (f.family == 'q' && f.n_bits <= 4) {  // fitted: the squared error is no larger than the plain span's
                    std::vector<float> spanned = x;
                    const double low = double{*std::min_element(x.begin(), x.end())};
                    const double step = span(x) / ((1 << f.n_bits) - 1);
                    for (float& v : spanned)
                        v = static_cast<float>(std::nearbyint((double{v} - low) / step) * step + low);
                    // At mean −100 the f16 minimum is off by up to a tenth of a step of q4.
                    CHECK(squared_error(x, y) <= squared_error(x, spanned) * (mean == -100.0f ? 1.2 : 1.01));
                    continue;
                }
                for (size_t i = 0; i < x.size(); i++) {
                    CHECK_MSG(std::fabs(double{x[i]} - double{y[i]}) <= bound,
                              std::string(lkv::format_name(f.format)) + " at mean " + std::to_string(mean) +
                                  ": error " + std::to_string(std::fabs(x[i] - y[i])) + ", bound " +
                                  std::to_string(bound));
                }
            }
        }
    }
}

void edges() {
    constexpr float tiny = 1e-42f;
    const std::vector<std::vector<float>> rows = {
        std::vector<float>(32, 0.0f),  std::vector<float>(32, -0.0f),  std::vector<float>(32, 1.0f),
        std::vector<float>(32, -2.5f), std::vector<float>(32, 1e-7f),  std::vector<float>(32, tiny),
        std::vector<float>(32, 1e30f), std::vector<float>(32, -1e30f),
    };
    for (const Known& f : known) {
        for (std::vector<float> x : rows) {
            for (const float first : {x[0], 0.0f, -x[0]}) {
                x[0] = first;
                for (const float v : round_trip(f, x)) CHECK(std::isfinite(v));
            }
        }
        CHECK(lkv::test::relative_error(round_trip(f, rows[0]), rows[0]) == 0.0);
        CHECK(lkv::test::relative_error(round_trip(f, rows[2]), rows[2]) < 1e-3);
        CHECK(lkv::test::relative_error(round_trip(f, rows[3]), rows[3]) < 1e-3);
        // Values past f16 saturate instead of turning infinite, and keep their sign.
        std::vector<float> big = rows[6];
        big[3] = -1e30f;
        const std::vector<float> y = round_trip(f, big);
        CHECK(y[0] >= 0.0f && y[3] <= 0.0f);
        // Same-sign rows far from zero: a step of 8 bits is far below the minimum's own rounding.
        if (f.family == 'q' && f.n_bits >= 5) {
            std::vector<float> offset(32);
            for (size_t i = 0; i < offset.size(); i++) offset[i] = 100.02f + 0.01f * static_cast<float>(i);
            const std::vector<float> back = round_trip(f, offset);
            for (size_t i = 0; i < back.size(); i++) {
                CHECK(std::fabs(back[i] - offset[i]) <=
                      (0.31f + 0.0625f) / static_cast<float>((1 << f.n_bits) - 1) * 0.51f + 1e-5f);
            }
        }
    }
    const std::vector<float> odd = {1.0f, -2.0f, 3.5f};
    CHECK(lkv::format_bytes(Format::f16, 3) == 8);
    CHECK(lkv::test::relative_error(round_trip(known[0], odd), odd) == 0.0);
}

void names() {
    // By number. Those of formats that are gone stay taken: no other format may ever have them.
    const char* order[] = {"none", "f16",  "q8",   "q6",     "q5",   "q4",   "q3",  "q2", "q1", "",   "",   "",
                           "",     "",     "",     "",       "q8_0", "q4_0", "f32", "c8", "c4", "c3", "c2", "bf16",
                           "q4_1", "q5_0", "q5_1", "iq4_nl", "n8",   "n6",   "n5",  "n4", "n3", "n2", "n1"};
    for (int i = 0; i < static_cast<int>(std::size(order)); i++) {
        const std::string name = order[i];
        CHECK(lkv::format_exists(static_cast<Format>(i)) == !name.empty());
        if (name.empty()) continue;
        CHECK(lkv::format_name(static_cast<Format>(i)) == name);
        CHECK(lkv::parse_format(name) == static_cast<Format>(i));
    }
    CHECK(!lkv::format_exists(static_cast<Format>(std::size(order))) && !lkv::format_exists(static_cast<Format>(-1)));
    CHECK(std::size(lkv::all_formats) == 27);
    for (const char* gone : {"q7", "", "?", "g8", "g6", "g5", "g4", "g3", "g2", "g1"}) CHECK(!lkv::parse_format(gone));
    CHECK(!lkv::format_is_quantized(Format::none) && !lkv::format_is_quantized(Format::f16) &&
          lkv::format_is_quantized(Format::q1) && lkv::format_is_quantized(Format::c4));
    CHECK(lkv::format_in_token_blocks(Format::c8) && lkv::format_in_token_blocks(Format::c2) &&
          !lkv::format_in_token_blocks(Format::f32) && !lkv::format_in_token_blocks(Format::none));
    for (const Format f : {Format::c8, Format::c4, Format::c3, Format::c2}) {
        CHECK(std::string(lkv::format_name(lkv::format_of_rows(f))) ==
              'q' + std::string(lkv::format_name(f)).substr(1));
    }
    CHECK(lkv::format_of_rows(Format::q5) == Format::q5);
    CHECK(lkv::format_bytes(Format::none, 64) == 0 && lkv::format_width_multiple(Format::none) == 1);
    CHECK_THROWS(lkv::write_segment(Format::c4, nullptr, 16, nullptr),
                 "[format] expected a format of single rows; got c4");
    CHECK_THROWS(lkv::write_segment(Format::none, nullptr, 16, nullptr),
                 "[format] expected a format of single rows; got none");
}

#ifdef LATENTKV_TEST_GGML
void bytes_as_ggml() {
    std::mt19937 random(4);
    for (const auto& [format, type] : {std::pair{Format::q8_0, GGML_TYPE_Q8_0},
                                       {Format::q4_0, GGML_TYPE_Q4_0},
                                       {Format::f16, GGML_TYPE_F16},
                                       {Format::bf16, GGML_TYPE_BF16},
                                       {Format::q4_1, GGML_TYPE_Q4_1},
                                       {Format::q5_0, GGML_TYPE_Q5_0},
                                       {Format::q5_1, GGML_TYPE_Q5_1}}) {
        for (int trial = 0; trial < 500; trial++) {
            const std::vector<float> x =
                gaussian(random, 128, std::exp2(static_cast<float>(trial % 24 - 14)), trial % 3 ? 0.0f : 1.0f);
            std::vector<uint8_t> ours(static_cast<size_t>(lkv::format_bytes(format, 128)));
            std::vector<uint8_t> theirs(ggml_row_size(type, 128));
            lkv::write_segment(format, x.data(), 128, ours.data());
            ggml_get_type_traits(type)->from_float_ref(x.data(), theirs.data(), 128);
            CHECK(ours == theirs);
        }
    }
}

// In iq4_nl the last bit of a scale may differ, and a value between two levels may take the other one.
void iq4_nl_as_ggml() {
    std::mt19937 random(5);
    int equal = 0;
    for (int trial = 0; trial < 500; trial++) {
        const std::vector<float> x = gaussian(random, 128, std::exp2(static_cast<float>(trial % 24 - 14)), 0.0f);
        std::vector<uint8_t> theirs(ggml_row_size(GGML_TYPE_IQ4_NL, 128));
        ggml_get_type_traits(GGML_TYPE_IQ4_NL)->from_float_ref(x.data(), theirs.data(), 128);
        std::vector<uint8_t> ours(static_cast<size_t>(lkv::format_bytes(Format::iq4_nl, 128)));
        lkv::write_segment(Format::iq4_nl, x.data(), 128, ours.data());
        equal += ours == theirs;
        std::vector<float> a(128), b(128);
        lkv::read_segment(Format::iq4_nl, ours.data(), 128, a.data());
        ggml_get_type_traits(GGML_TYPE_IQ4_NL)->to_float(theirs.data(), b.data(), 128);
        CHECK(squared_error(x, a) <= 1.001 * squared_error(x, b));
    }
    CHECK(equal > 450);
}
#endif

}  // namespace

int main() {
    halves();
    error_bounds();
    edges();
    names();
#ifdef LATENTKV_TEST_GGML
    bytes_as_ggml();
    iq4_nl_as_ggml();
#endif
    return lkv::test::report("formats");
}
