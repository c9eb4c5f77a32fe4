#include "ops/cpu/codes/code_scores.h"

#include <algorithm>
#include <numeric>

#include "cache/formats.h"
#include "ops/cpu/codes/packs.h"

namespace lkv {

namespace {

constexpr int most_rows =
    wide_lanes == 16 ? 10 : 6;  // at once: their sums stay in registers, of which AVX2 has 16 and AVX-512 32

template <int Bits>
constexpr int n_packs(int width) {
    return Packs<Bits>::groups(width) * Packs<Bits>::per_group;
}

// Puts one query row's integers of a segment into packs.
template <int Bits>
void pack(const int32_t* n, int width, int32_t* packs, int stride) {
    using P = Packs<Bits>;
    for (int i = 0; i < P::groups(width) * P::per_group; i++, packs += stride) {
        uint32_t all = 0;
        for (int j = 0; j < P::in_pack; j++) {
            const int channel = P::channel(i, j);
            const auto value = static_cast<uint32_t>(channel < width ? n[channel] : 0);
            all |= (value & ~0u >> (32 - P::apart)) << (P::apart * j);
        }
        *packs = static_cast<int32_t>(all);
    }
}

// words: [n_words, 64] from n_words words of every slot, `offset` bytes into its row. Nothing after them is read.
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

// acc[r] += Σ n·code over n_groups groups of packs, R rows against wide_lanes slots.
template <int Bits, int R>
LKV_INLINE void dots(const uint32_t* words, int n_groups, const int32_t* packs, int stride, u32xw (&acc)[R]) {
    using P = Packs<Bits>;
    using Dot = ByteDot<wide_lanes>;
    constexpr bool bytes = P::in_pack == 4;
    // packs whose products of bytes fit a sum before it is widened; of 16-bit integers round_query leaves room for all
    constexpr int most_packs = bytes ? Dot::most / (Planes<Bits>::levels * byte_query) : max_coded_width;
    constexpr int at_once = std::max(1, most_packs / P::per_group);
    u32xw sums[R];
    const auto widen = [&]() __attribute__((always_inline)) {
        LKV_UNROLL
        for (int r = 0; r < R; r++) {
            acc[r] += bytes ? Dot::widen(sums[r]) : sums[r];
            sums[r] = u32xw{};
        }
    };
    LKV_UNROLL
    for (int r = 0; r < R; r++) sums[r] = u32xw{};
    for (int first = 0; first < n_groups; first += at_once) {
        for (int group = first; group < std::min(n_groups, first + at_once); group++) {
            const P of(words, group);
            LKV_UNROLL
            for (int i = 0; i < P::per_group; i++, packs += stride) {
                const u32xw codes = of.pack(i);
                LKV_UNROLL
                for (int r = 0; r < R; r++) {
                    sums[r] =
                        bytes ? Dot::add(sums[r], codes, packs[r]) : add_pairs<wide_lanes>(sums[r], codes, packs[r]);
                }
                if constexpr (most_packs < P::per_group) {
                    if ((i + 1) % most_packs == 0) widen();
                }
            }
        }
        widen();
    }
}

// What a segment's codes are multiplied with, slot by slot.
struct SlotScales {
    const uint32_t* heads;  // [64] scale and minimum, or the group's scales
    int shift;              // of the group's scale; -1: scale and minimum
};

// Adds one segment's part to the scores of R rows.
template <int Bits, int R>
void segment_scores(const SlotScales& of, const uint32_t* words, int width, const int32_t* packs, int stride,
                    const float* steps, const float* sums, float* const* scores) {
    const int n_groups = Packs<Bits>::groups(width);
    for (int s = 0; s < tile_slots; s += wide_lanes) {
        u32xw acc[R];
        LKV_UNROLL
        for (int r = 0; r < R; r++) acc[r] = u32xw{};
        dots<Bits, R>(words + s, n_groups, packs, stride, acc);
        const u32xw head = load_wide<u32xw>(of.heads + s);
        if (of.shift >= 0) {
            const f32xw scale = half_to_f32((head >> of.shift & 0xffu) << 7);
            LKV_UNROLL
            for (int r = 0; r < R; r++) {
                const f32xw product =
                    fma_wide(signed_to_f32<wide_lanes>(acc[r]), f32xw{} + steps[r], f32xw{} + sums[r]);
                store_wide(scores[r] + s, fma_wide(product, scale, load_wide<f32xw>(scores[r] + s)));
            }
            continue;
        }
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
    return (last.offset + format_bytes(static_cast<Format>(last.format), last.width) - segments.front().scales) /
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
            const auto levels = scaled_by_group(segment);
            with_bits(segment.format, [&](auto bits) {
                constexpr int Bits = decltype(bits)::value;
                const float step = round_query<Bits>({x, static_cast<size_t>(segment.width)}, n);
                const auto sum = static_cast<float>(std::accumulate(n, n + segment.width, int64_t{0}));
                queries.steps[at] = levels ? step * levels->step : step;
                queries.sums[at] = levels ? step * sum * levels->bottom : step * sum;
                pack<Bits>(n, segment.width, packs, stride);
                packs += n_packs<Bits>(segment.width) * stride;
            });
            at += stride;
        }
    }
}

void coded_scores(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, ReadAhead& ahead,
                  const CodedQueries& queries, uint32_t* words, float* const* scores) {
    const auto segments = segments_of(layout, group);
    const int first = segments.front().scales;
    transpose(rows, first, coded_words(layout, group), ahead, words);
    const int n_rows = queries.n_rows;
    for (int r = 0; r < n_rows; r++) {
        for (int s = 0; s < tile_slots; s += lanes)
            store8(scores[r] + s, f32x8{});  // of std::fill_n GCC makes `rep stos`
    }
    const int32_t* packs = queries.packs;
    int at = 0;
    for (const SegmentLayout& segment : segments) {
        const auto word_of = [&](int byte) { return words + (byte - first) / word_bytes * tile_slots; };
        const auto scaled = scaled_by_group(segment);
        const SlotScales scales{word_of(segment.scales), scaled ? 8 * (scaled->scale_at - segment.scales) : -1};
        with_bits(segment.format, [&](auto bits) {
            constexpr int Bits = decltype(bits)::value;
            segment_scores<Bits>(scales, word_of(codes_at(segment)), segment.width, n_rows, packs, queries.steps + at,
                                 queries.sums + at, scores);
            packs += n_packs<Bits>(segment.width) * n_rows;
        });
        at += n_rows;
    }
}

}  // namespace lkv
