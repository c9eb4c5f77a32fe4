// Blocks of 32 slots with one scale and minimum per channel: the byte map against a reader written from its text, the error
// of every channel, mixed rows, demotion into a block.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "cache/formats.h"
#include "cache/row.h"
#include "check.h"

namespace {

using lkv::Format;
using lkv::RowLayout;
using lkv::RowPlan;
using lkv::token_block_slots;
using lkv::test::relative_error;

struct Known {
    Format format;
    int n_bits;
};

constexpr Known known[] = {{Format::c8, 8}, {Format::c4, 4}, {Format::c3, 3}, {Format::c2, 2}};

double half_value(unsigned h) {
    const double sign = h & 0x8000 ? -1.0 : 1.0;
    const int exponent = static_cast<int>(h >> 10 & 31);
    const double fraction = static_cast<double>(h & 1023) / 1024.0;
    return exponent == 0 ? sign * std::ldexp(fraction, -14) : sign * std::ldexp(1.0 + fraction, exponent - 15);
}

// Code of a channel, read from the text of planes.h.
int plane_code(const uint8_t* chunk, int n_bits, int j) {
    switch (n_bits) {
        case 8:
            return chunk[j];
        case 4:
            return chunk[j % 8] >> (4 * (j / 8)) & 15;
        case 3:
            return (chunk[j % 4] >> (2 * (j / 4)) & 3) | (chunk[4 + j / 8] >> (j % 8) & 1) << 2;
        default:
            return chunk[j % 4] >> (2 * (j / 4)) & 3;
    }
}

// Number k of the 2·width of a block: the slot that holds it, and where behind that slot's codes.
double number(const uint8_t* rows, int64_t stride, int width, int n_bits, int k) {
    const int in_slot = width / 16;
    const uint8_t* at = rows + k / in_slot * stride + width * n_bits / 8 + 2 * (k % in_slot);
    return half_value(at[0] | static_cast<unsigned>(at[1]) << 8);
}

// x: [32, width]: channels of unlike spread and mean, as keys have them. One is constant, one zero.
std::vector<float> keys(int width, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(token_block_slots * width));
    for (int c = 0; c < width; c++) {
        const float spread = std::exp2(static_cast<float>(c % 9) - 4.0f);
        const float mean = static_cast<float>(c % 5 - 2) * 3.0f * spread;
        for (int i = 0; i < token_block_slots; i++) {
            const float v = c == 3 ? -2.5f : c == 4 ? 0.0f : mean + spread * normal(random);
            x[static_cast<size_t>(i * width + c)] = v;
        }
    }
    return x;
}

void byte_map() {
    for (const Known& f : known) {
        for (const int width : {16, 48, 64, 80, 320}) {
            const int n_bytes = lkv::format_bytes(f.format, width);
            CHECK(n_bytes == (width * f.n_bits / 8 + width / 8 + 3) / 4 * 4);
            const RowPlan plan({{{f.format, width}}});
            const RowLayout row = plan.view();
            CHECK(row.row_bytes == n_bytes && lkv::in_token_blocks(row));
            const std::vector<float> x = keys(width, static_cast<unsigned>(width));
            std::vector<uint8_t> rows(static_cast<size_t>(3 * token_block_slots * n_bytes), 0xa5);
            uint8_t* const block = &rows[static_cast<size_t>(token_block_slots * n_bytes)];
            lkv::write_token_block(row, x.data(), block);
            for (int i = 0; i < token_block_slots * n_bytes; i++) {
                CHECK(rows[static_cast<size_t>(i)] == 0xa5 && block[token_block_slots * n_bytes + i] == 0xa5);
            }
            const double levels = (1 << f.n_bits) - 1;
            for (int c = 0; c < width; c++) {
                const double scale = number(block, n_bytes, width, f.n_bits, c);
                const double minimum = number(block, n_bytes, width, f.n_bits, width + c);
                double low = INFINITY;
                double high = -INFINITY;
                double error = 0.0;
                double spanned = 0.0;  // of a step from the least to the largest of the channel's 32 values
                for (int i = 0; i < token_block_slots; i++) {
                    low = std::min(low, double{x[static_cast<size_t>(i * width + c)]});
                    high = std::max(high, double{x[static_cast<size_t>(i * width + c)]});
                }
                std::vector<float> y(static_cast<size_t>(width), NAN);
                for (int i = 0; i < token_block_slots; i++) {
                    lkv::read_slot(row, rows.data(), token_block_slots + i, y.data());
                    const int code = plane_code(block + i * n_bytes + c / 16 * 2 * f.n_bits, f.n_bits, c % 16);
                    const double want = code * scale + minimum;
                    const double got = double{y[static_cast<size_t>(c)]};
                    CHECK(std::fabs(got - want) <= 1e-6 * (std::fabs(minimum) + levels * scale));
                    const double v = double{x[static_cast<size_t>(i * width + c)]};
                    const double step = (high - low) / levels;
                    const double rounded = step > 0.0 ? std::nearbyint((v - low) / step) * step + low : low;
                    error += (got - v) * (got - v);
                    spanned += (rounded - v) * (rounded - v);
                }
                const double peak = std::max(std::fabs(low), std::fabs(high));
                if (f.n_bits == 8) {  // spans the values: half a step, of a span that f16 rounds up
                    CHECK(error <=
                          token_block_slots * std::pow((high - low + peak / 1024) / levels * 0.502, 2.0) + 1e-12);
                    continue;
                }
                // a constant channel keeps its value, any other is no worse than its own span allows
                const double slack = token_block_slots * std::pow(peak / 2048.0, 2.0);
                CHECK_MSG(error <= 1.02 * spanned + slack,
                          std::string(lkv::format_name(f.format)) + " channel " + std::to_string(c) +
                              ": squared error " + std::to_string(error) + ", of its span " + std::to_string(spanned));
                // 32 unlike tokens share a step: groups of one token would have none to lose
                if (c != 3 && c != 4) CHECK(error > 0.05 * spanned);
            }
        }
    }
}

// What a scale per token cannot do: one channel a hundred times wider than the others costs them nothing.
void wide_channel() {
    constexpr int width = 64;
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    std::vector<float> x(token_block_slots * width);
    for (size_t i = 0; i < x.size(); i++) x[i] = normal(random) * (i % width == 7 ? 100.0f : 1.0f);
    const auto error_of_others = [&](Format format) {
        const RowPlan plan({{{format, width}}});
        const RowLayout row = plan.view();
        std::vector<uint8_t> rows(static_cast<size_t>(token_block_slots * row.row_bytes));
        if (lkv::in_token_blocks(row)) {
            lkv::write_token_block(row, x.data(), rows.data());
        } else {
            for (int i = 0; i < token_block_slots; i++)
                lkv::write_row(row, &x[static_cast<size_t>(i * width)], &rows[static_cast<size_t>(i * row.row_bytes)]);
        }
        std::vector<float> got;
        std::vector<float> want;
        std::vector<float> y(width);
        for (int i = 0; i < token_block_slots; i++) {
            lkv::read_slot(row, rows.data(), i, y.data());
            for (int c = 0; c < width; c++) {
                if (c == 7) continue;
                got.push_back(y[static_cast<size_t>(c)]);
                want.push_back(x[static_cast<size_t>(i * width + c)]);
            }
        }
        return relative_error(got, want);
    };
    CHECK(error_of_others(Format::c4) < 0.12);
    CHECK(error_of_others(Format::q4) > 0.5);
}

void demotion() {
    // a row that mixes: f16 kept bit for bit, q4 requantized in single rows, c3 in a block, the rest dropped
    const RowPlan exact(
        {{{Format::f16, 16}, {Format::f16, 32}, {Format::q8, 48}, {Format::f16, 16}}, {{Format::f16, 32}}});
    const RowPlan lower(
        {{{Format::f16, 16}, {Format::q4, 32}, {Format::c3, 48}, {Format::none, 16}}, {{Format::c2, 32}}});
    const RowLayout from = exact.view();
    const RowLayout to = lower.view();
    CHECK(!lkv::in_token_blocks(from) && lkv::in_token_blocks(to));
    const std::vector<float> x = keys(from.width, 9);
    std::vector<uint8_t> source(static_cast<size_t>(token_block_slots * from.row_bytes));
    std::vector<const uint8_t*> src(token_block_slots);
    std::vector<float> stored(x.size());
    for (int i = 0; i < token_block_slots; i++) {
        uint8_t* const row = &source[static_cast<size_t>((token_block_slots - 1 - i) * from.row_bytes)];  // any order
        lkv::write_row(from, &x[static_cast<size_t>(i * from.width)], row);
        lkv::read_row(from, row, &stored[static_cast<size_t>(i * from.width)]);
        src[static_cast<size_t>(i)] = row;
    }
    std::vector<uint8_t> got(static_cast<size_t>(token_block_slots * to.row_bytes));
    std::vector<uint8_t> want(got.size());
    lkv::move_token_block(from, src.data(), to, got.data());
    lkv::write_token_block(to, stored.data(), want.data());
    CHECK(got == want);  // f16 to f16 is exact either way
    std::vector<float> y(static_cast<size_t>(to.width));
    for (int i = 0; i < token_block_slots; i++) {
        lkv::read_slot(to, got.data(), i, y.data());
        for (int c = 0; c < 16; c++)
            CHECK(y[static_cast<size_t>(c)] == stored[static_cast<size_t>(i * from.width + c)]);
        for (int c = 96; c < 112; c++) CHECK(y[static_cast<size_t>(c)] == 0.0f);
    }
    CHECK_THROWS(lkv::write_row(to, x.data(), got.data()), "[format] expected a format of single rows; got c3");
    CHECK_THROWS(lkv::read_row(to, got.data(), y.data()), "[format] expected a format of single rows; got c3");
    CHECK_THROWS(lkv::move_token_block(from, src.data(), RowPlan::uniform(1, 16, Format::c2).view(), got.data()),
                 "[row] expected 2 groups of 144 channels in both layouts; got 1 groups of 16");
    CHECK_THROWS(RowPlan({{{Format::c2, 24}}}), "positive multiple of 16 for format c2; got 24");
}

// Fewer tokens than a block has, far from 0: what fills the block up widens no channel's range.
void regrouping() {
    constexpr int width = 64;
    constexpr int n = 12;
    std::mt19937 random(3);
    std::normal_distribution<float> normal(100.0f, 1.0f);
    std::vector<float> x(token_block_slots * width);
    for (float& v : x) v = normal(random);
    const RowPlan plan({{{Format::c8, width}}});
    const RowLayout row = plan.view();
    std::vector<uint8_t> rows(static_cast<size_t>(2 * token_block_slots * row.row_bytes));
    lkv::write_token_block(row, x.data(), &rows[static_cast<size_t>(token_block_slots * row.row_bytes)]);
    std::vector<int> from;
    std::vector<int> to;
    for (int i = 0; i < n; i++) {
        from.push_back(token_block_slots + 2 * i);
        to.push_back(i);
    }
    lkv::regroup_rows(row, rows.data(), lkv::bytes_of_page(row.row_bytes), from, to);
    std::vector<float> y(width);
    for (int i = 0; i < n; i++) {
        lkv::read_slot(row, rows.data(), i, y.data());
        for (int c = 0; c < width; c++) {
            CHECK(std::fabs(y[static_cast<size_t>(c)] - x[static_cast<size_t>(2 * i * width + c)]) < 0.05f);
        }
    }
}

}  // namespace

int main() {
    byte_map();
    wide_channel();
    demotion();
    regrouping();
    return lkv::test::report("block");
}
