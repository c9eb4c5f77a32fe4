#include "ops/cpu/code_scores.h"

#include <algorithm>
#include <cmath>

#include "base/wide.h"
#include "cache/formats.h"

namespace lkv {

namespace {

constexpr int word_bytes = 4;
constexpr int most_rows =
    wide_lanes == 16 ? 10 : 6;  // at once: their sums stay in registers, of which AVX2 has 16 and AVX-512 32

// Where planes.h puts the codes of a segment, in words of 32 bits behind its scale and minimum.
template <int Bits>
struct Words {
    static constexpr int steps = 16 / Bits;  // pairs of a word
    static constexpr uint32_t mask = Planes<Bits>::levels * 0x00010001u;

    static constexpr int count(int width) { return (width * Bits + 31) / 32; }

    // Channel of the code at this bit of a word.
    static constexpr int channel(int word, int bit) {
        return channel_of<Bits>(word_bytes * word + bit / 8, bit % 8 / Bits);
    }
};

// Puts one query row's integers of a segment into pairs, and returns their sum.
template <int Bits>
int64_t pair_up(const int32_t* n, int width, int32_t* pairs, int stride) {
    using W = Words<Bits>;
    const auto at = [&](int channel) { return channel < width ? n[channel] : 0; };
    for (int word = 0; word < W::count(width); word++) {
        for (int i = 0; i < W::steps; i++, pairs += stride) {
            const int low = at(W::channel(word, Bits * i));
            const int high = at(W::channel(word, Bits * i + 16));
            *pairs = static_cast<int32_t>((static_cast<uint32_t>(low) & 0xffffu) | static_cast<uint32_t>(high) << 16);
        }
    }
    int64_t sum = 0;
    for (int c = 0; c < width; c++) sum += n[c];
    return sum;
}

// words: [n_words, 64] from n_words words of every slot, `offset` bytes into its row. Nothing behind them is read.
void turn(const TileRows& rows, int offset, int n_words, ReadAhead& ahead, uint32_t* words) {
    for (int s0 = 0; s0 < tile_slots; s0 += lanes) {
        for (int s = 0; s < lanes; s++) ahead.pull(n_words * word_bytes);
        for (int w0 = 0; w0 < n_words; w0 += lanes) {
            const int first = std::max(0, std::min(w0, n_words - lanes));  // the last ones again, rather than fewer
            const int n = std::min(lanes, n_words);
            u32x8 r[lanes];
            LKV_UNROLL
            for (int s = 0; s < lanes; s++) {
                const uint8_t* const src = rows.slot[s0 + s] + offset + first * word_bytes;
                if (n == lanes) {
                    memcpy(&r[s], src, sizeof r[s]);
                } else {
                    r[s] = u32x8{};
                    memcpy(&r[s], src, static_cast<size_t>(n) * word_bytes);
                }
            }
            transpose8(r);
            for (int i = 0; i < n; i++) memcpy(words + (first + i) * tile_slots + s0, &r[i], sizeof r[i]);
        }
    }
}

// Σ n·code of R rows against wide_lanes slots.
template <int Bits, int R>
LKV_INLINE void dots(const uint32_t* words, int n_words, const int32_t* pairs, int stride, u32xw (&acc)[R]) {
    using W = Words<Bits>;
    LKV_UNROLL
    for (int r = 0; r < R; r++) acc[r] = u32xw{};
    for (int word = 0; word < n_words; word++) {
        const u32xw w = load_wide<u32xw>(words + word * tile_slots);
        LKV_UNROLL
        for (int i = 0; i < W::steps; i++, pairs += stride) {
            const u32xw codes = (w >> Bits * i) & W::mask;
            LKV_UNROLL
            for (int r = 0; r < R; r++) acc[r] = add_pairs<wide_lanes>(acc[r], codes, pairs[r]);
        }
    }
}

// Adds one segment's part to the scores of R rows, in units of their steps.
template <int Bits, int R>
void segment_scores(const uint32_t* words, int width, const int32_t* pairs, int stride, const float* sums,
                    float* const* scores) {
    const int n_words = Words<Bits>::count(width);
    for (int s = 0; s < tile_slots; s += wide_lanes) {
        u32xw acc[R];
        dots<Bits, R>(words + tile_slots + s, n_words, pairs, stride, acc);
        const u32xw head = load_wide<u32xw>(words + s);
        const f32xw scale = half_to_f32(head & 0xffffu);
        const f32xw minimum = half_to_f32(head >> 16);
        LKV_UNROLL
        for (int r = 0; r < R; r++) {
            const f32xw constant = fma_wide(minimum, f32xw{} + sums[r], load_wide<f32xw>(scores[r] + s));
            store_wide(scores[r] + s, fma_wide(scale, signed_to_f32<wide_lanes>(acc[r]), constant));
        }
    }
}

// All rows, in blocks of much the same size.
template <int Bits>
void segment_scores(const uint32_t* words, int width, const CodedQueries& queries, const int32_t* pairs,
                    const float* sums, float* const* scores) {
    for_even_blocks<most_rows>(queries.n_rows, [&](auto rows, int r) {
        segment_scores<Bits, decltype(rows)::value>(words, width, pairs + r, queries.n_rows, sums + r, scores + r);
    });
}

}  // namespace

int coded_words(const RowLayout& layout, const GroupLayout& group) {
    const auto segments = segments_of(layout, group);
    const SegmentLayout& last = segments.back();
    return (last.offset + format_bytes(static_cast<Format>(last.format), last.width) - segments.front().offset) /
           word_bytes;
}

void code_queries(const RowLayout& layout, const GroupLayout& group, std::span<const float* const> q,
                  const CodedQueries& queries) {
    int widest = 0;
    for (const SegmentLayout& segment : segments_of(layout, group)) widest = std::max(widest, segment.width);
    // 16 bits, and what keeps a sum of `width` products with codes of 8 within 32
    const float most = static_cast<float>(std::min(32767, 0x7fffffff / 255 / std::max(1, widest)));
    for (int r = 0; r < queries.n_rows; r++) {
        const float* const x = q[static_cast<size_t>(r)];
        float reach = 0.0f;
        for (int c = 0; c < group.kept; c++) reach = std::max(reach, std::fabs(x[c]));
        const float step = reach / most;
        const float inverse = reach > 0.0f ? most / reach : 0.0f;
        queries.steps[r] = step;
        int32_t* pairs = queries.pairs + r;
        float* sum = queries.sums + r;
        for (const SegmentLayout& segment : segments_of(layout, group)) {
            int32_t n[max_coded_width];
            const float* const from = x + (segment.column - group.column);
            for (int c = 0; c < segment.width; c++) n[c] = static_cast<int32_t>(std::lrintf(from[c] * inverse));
            with_bits(segment.format, [&](auto bits) {
                using W = Words<decltype(bits)::value>;
                *sum = static_cast<float>(pair_up<decltype(bits)::value>(n, segment.width, pairs, queries.n_rows));
                pairs += W::count(segment.width) * W::steps * queries.n_rows;
            });
            sum += queries.n_rows;
        }
    }
}

void coded_scores(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, ReadAhead& ahead,
                  const CodedQueries& queries, uint32_t* words, float* const* scores) {
    const int first = segments_of(layout, group).front().offset;
    turn(rows, first, coded_words(layout, group), ahead, words);
    for (int r = 0; r < queries.n_rows; r++) std::fill_n(scores[r], tile_slots, 0.0f);
    const int32_t* pairs = queries.pairs;
    const float* sums = queries.sums;
    for (const SegmentLayout& segment : segments_of(layout, group)) {
        const uint32_t* const from = words + (segment.offset - first) / word_bytes * tile_slots;
        with_bits(segment.format, [&](auto bits) {
            using W = Words<decltype(bits)::value>;
            segment_scores<decltype(bits)::value>(from, segment.width, queries, pairs, sums, scores);
            pairs += W::count(segment.width) * W::steps * queries.n_rows;
        });
        sums += queries.n_rows;
    }
    for (int r = 0; r < queries.n_rows; r++) {
        for (int s = 0; s < tile_slots; s += lanes) {
            store8(scores[r] + s, load8(scores[r] + s) * splat(queries.steps[r]));
        }
    }
}

}  // namespace lkv
