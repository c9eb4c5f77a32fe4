#include "ops/cpu/codes/code_scores.h"

#include <algorithm>
#include <numeric>

#include "cache/formats.h"

namespace lkv {

namespace {

constexpr int word_bytes = 4;
constexpr int most_rows =
    wide_lanes == 16 ? 10 : 6;  // at once: their sums stay in registers, of which AVX2 has 16 and AVX-512 32

// Where planes.h puts the codes of a segment, in words of 32 bits. A pack is what a lane multiplies at
// once: the codes that (word >> bits·i) & mask leaves, i < steps.
template <int Bits>
struct Words {
    static constexpr int in_pack = query_bits(Bits) == 8 ? 4 : 2;
    static constexpr int apart = 32 / in_pack;  // bits between codes of a pack
    static constexpr int steps = apart / Bits;
    static constexpr uint32_t ones = in_pack == 4 ? 0x01010101u : 0x00010001u;
    static constexpr uint32_t mask = Planes<Bits>::levels * ones;

    static constexpr int count(int width) { return (width * Bits + 31) / 32; }
    static constexpr int packs(int width) { return count(width) * steps; }

    // Channel of the code at this bit of a word.
    static constexpr int channel(int word, int bit) {
        return channel_of<Bits>(word_bytes * word + bit / 8, bit % 8 / Bits);
    }
};

// Puts one query row's integers of a segment into packs.
template <int Bits>
void pack(const int32_t* n, int width, int32_t* packs, int stride) {
    using W = Words<Bits>;
    for (int word = 0; word < W::count(width); word++) {
        for (int i = 0; i < W::steps; i++, packs += stride) {
            uint32_t all = 0;
            for (int j = 0; j < W::in_pack; j++) {
                const int channel = W::channel(word, Bits * i + W::apart * j);
                const auto value = static_cast<uint32_t>(channel < width ? n[channel] : 0);
                all |= (value & ~0u >> (32 - W::apart)) << (W::apart * j);
            }
            *packs = static_cast<int32_t>(all);
        }
    }
}

// words: [n_words, 64] from n_words words of every slot, `offset` bytes into its row. Nothing behind them is read.
void transpose(const TileRows& rows, int offset, int n_words, ReadAhead& ahead, uint32_t* words) {
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

// acc[r] += Σ n·code over n_words words, R rows against wide_lanes slots.
template <int Bits, int R>
LKV_INLINE void dots(const uint32_t* words, int n_words, const int32_t* packs, int stride, u32xw (&acc)[R]) {
    using W = Words<Bits>;
    using Dot = ByteDot<wide_lanes>;
    constexpr bool bytes = W::in_pack == 4;
    // words whose products of bytes fit a sum before it is widened; of 16-bit integers round_query leaves room for all
    constexpr int at_once = bytes ? Dot::most / (Planes<Bits>::levels * byte_query) / W::steps : max_coded_width;
    for (int first = 0; first < n_words; first += at_once) {
        u32xw sums[R];
        LKV_UNROLL
        for (int r = 0; r < R; r++) sums[r] = u32xw{};
        for (int word = first; word < std::min(n_words, first + at_once); word++) {
            const u32xw w = load_wide<u32xw>(words + word * tile_slots);
            LKV_UNROLL
            for (int i = 0; i < W::steps; i++, packs += stride) {
                const u32xw codes = (w >> Bits * i) & W::mask;
                LKV_UNROLL
                for (int r = 0; r < R; r++) {
                    sums[r] =
                        bytes ? Dot::add(sums[r], codes, packs[r]) : add_pairs<wide_lanes>(sums[r], codes, packs[r]);
                }
            }
        }
        LKV_UNROLL
        for (int r = 0; r < R; r++) acc[r] += bytes ? Dot::widen(sums[r]) : sums[r];
    }
}

// What a segment's codes are multiplied with, slot by slot.
struct SlotScales {
    const uint32_t* heads;  // [64] scale and minimum; null: the row has the scale
    const float* of_rows;   // [64]
};

// Adds one segment's part to the scores of R rows.
template <int Bits, int R>
void segment_scores(const SlotScales& of, const uint32_t* words, int width, const int32_t* packs, int stride,
                    const float* steps, const float* sums, float* const* scores) {
    const int n_words = Words<Bits>::count(width);
    for (int s = 0; s < tile_slots; s += wide_lanes) {
        u32xw acc[R];
        LKV_UNROLL
        for (int r = 0; r < R; r++) acc[r] = u32xw{};
        dots<Bits, R>(words + s, n_words, packs, stride, acc);
        if (of.heads == nullptr) {
            const f32xw scale = load_wide<f32xw>(of.of_rows + s);
            LKV_UNROLL
            for (int r = 0; r < R; r++) {
                const f32xw product =
                    fma_wide(signed_to_f32<wide_lanes>(acc[r]), f32xw{} + steps[r], f32xw{} + sums[r]);
                store_wide(scores[r] + s, fma_wide(product, scale, load_wide<f32xw>(scores[r] + s)));
            }
            continue;
        }
        const u32xw head = load_wide<u32xw>(of.heads + s);
        const f32xw scale = half_to_f32(head & 0xffffu);
        const f32xw minimum = half_to_f32(head >> 16);
        LKV_UNROLL
        for (int r = 0; r < R; r++) {
            const f32xw before = fma_wide(minimum, f32xw{} + sums[r], load_wide<f32xw>(scores[r] + s));
            const f32xw product = scale * signed_to_f32<wide_lanes>(acc[r]);
            store_wide(scores[r] + s, fma_wide(product, f32xw{} + steps[r], before));
        }
    }
}

// All rows, in blocks of much the same size.
template <int Bits>
void segment_scores(const SlotScales& of, const uint32_t* words, int width, int n_rows, const int32_t* packs,
                    const float* steps, const float* sums, float* const* scores) {
    for_even_blocks<most_rows>(n_rows, [&](auto rows, int r) {
        segment_scores<Bits, decltype(rows)::value>(of, words, width, packs + r, n_rows, steps + r, sums + r,
                                                    scores + r);
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
    const int stride = queries.n_rows;
    for (int r = 0; r < stride; r++) {
        int32_t* packs = queries.packs + r;
        int at = r;
        for (const SegmentLayout& segment : segments_of(layout, group)) {
            int32_t n[max_coded_width];
            const float* const x = q[static_cast<size_t>(r)] + (segment.column - group.column);
            const auto levels = scaled_by_row(segment);
            with_bits(segment.format, [&](auto bits) {
                constexpr int Bits = decltype(bits)::value;
                const float step = round_query<Bits>({x, static_cast<size_t>(segment.width)}, n);
                const auto sum = static_cast<float>(std::accumulate(n, n + segment.width, int64_t{0}));
                queries.steps[at] = levels ? step * levels->step : step;
                queries.sums[at] = levels ? step * sum * levels->bottom : step * sum;
                pack<Bits>(n, segment.width, packs, stride);
                packs += Words<Bits>::packs(segment.width) * stride;
            });
            at += stride;
        }
    }
}

void coded_scores(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, ReadAhead& ahead,
                  const CodedQueries& queries, uint32_t* words, float* const* scores) {
    const auto segments = segments_of(layout, group);
    const int first = segments.front().offset;
    transpose(rows, first, coded_words(layout, group), ahead, words);
    const int n_rows = queries.n_rows;
    for (int r = 0; r < n_rows; r++) {
        for (int s = 0; s < tile_slots; s += lanes)
            store8(scores[r] + s, f32x8{});  // of std::fill_n GCC makes `rep stos`
    }
    float of_rows[tile_slots];
    int of_rows_at = -1;
    const int32_t* packs = queries.packs;
    int at = 0;
    for (const SegmentLayout& segment : segments) {
        const auto word_of = [&](int byte) { return words + (byte - first) / word_bytes * tile_slots; };
        const auto scaled = scaled_by_row(segment);
        if (scaled && scaled->scale_at != of_rows_at) {
            of_rows_at = scaled->scale_at;
            row_scales(rows, of_rows_at, of_rows);
        }
        const SlotScales scales{scaled ? nullptr : word_of(segment.offset), of_rows};
        with_bits(segment.format, [&](auto bits) {
            constexpr int Bits = decltype(bits)::value;
            segment_scores<Bits>(scales, word_of(codes_at(segment)), segment.width, n_rows, packs, queries.steps + at,
                                 queries.sums + at, scores);
            packs += Words<Bits>::packs(segment.width) * n_rows;
        });
        at += n_rows;
    }
}

}  // namespace lkv
