#include "ops/cpu/code_values.h"

#include <cmath>

#include "base/wide.h"

namespace lkv {

namespace {

using Header = AffineFormat<8>;                       // of all these formats
constexpr int most_rows = wide_lanes == 16 ? 10 : 5;  // at once, with most_planes each: their sums stay in registers
constexpr int most_planes = 2;
constexpr int n_pairs = tile_slots / 2;

// One segment in a tile's rows, and its query rows' weights as integers.
struct Tile {
    Tile(const TileRows& tile_rows, int n) : rows(tile_rows), n_rows(n) {}  // the arrays are not worth clearing

    const TileRows& rows;
    int n_rows;
    int offset = 0;                          // of the codes
    int32_t pairs[max_coded_rows][n_pairs];  // of weights · scale: slot 2i low, 2i + 1 high
    float step[max_coded_rows];
    float constant[max_coded_rows];  // Σ weight · minimum
};

// Of a segment, all slots of a tile.
struct Headers {
    static constexpr int n_vectors = tile_slots / wide_lanes;
    f32xw scale[n_vectors];
    f32xw ratio[n_vectors];  // of minimum and scale
    f32xw flat[n_vectors];   // minimum where the scale is 0
    bool any_flat = false;

    Headers(const TileRows& rows, int offset) {
        uint32_t words[tile_slots];
        for (int s = 0; s < tile_slots; s++) memcpy(&words[s], rows.slot[s] + offset, sizeof words[s]);
        i32xw flats{};
        for (int v = 0; v < n_vectors; v++) {
            const u32xw word = load_wide<u32xw>(words + v * wide_lanes);
            const f32xw minimum = half_to_f32(word >> 16);
            scale[v] = half_to_f32(word & 0xffffu);
            const i32xw is_flat = !(scale[v] > 0.0f);
            ratio[v] = is_flat ? f32xw{} : minimum / scale[v];
            flat[v] = is_flat ? minimum : f32xw{};
            flats |= is_flat & (minimum != 0.0f);
        }
        any_flat = any(flats);
    }
};

// What the integers lose, they lose of scale · code + minimum, not of codes that are all positive: the minimum is weighed with them.
void weigh(const Headers& of, const float* weights, int32_t* pairs, float& step, float& constant) {
    f32xw product[Headers::n_vectors];
    f32xw most{};
    for (int v = 0; v < Headers::n_vectors; v++) {
        product[v] = load_wide<f32xw>(weights + v * wide_lanes) * of.scale[v];
        most = product[v] > most ? product[v] : most;
    }
    const float reach = wide_max(most);
    step = reach / 32767.0f;
    const f32xw inverse = f32xw{} + (reach > 0.0f ? 32767.0f / reach : 0.0f);
    f32xw whole{};
    for (int v = 0; v < Headers::n_vectors; v++) {
        const i32xw n = __builtin_convertvector(fma_wide(product[v], inverse, f32xw{} + 0.5f), i32xw);
        whole = fma_wide(__builtin_convertvector(n, f32xw), of.ratio[v], whole);
        store_wide(reinterpret_cast<int16_t*>(pairs) + v * wide_lanes, __builtin_convertvector(n, i16xw));
    }
    constant = wide_sum(whole) * step;
    if (of.any_flat) {
        f32xw exact{};
        for (int v = 0; v < Headers::n_vectors; v++) {
            exact = fma_wide(load_wide<f32xw>(weights + v * wide_lanes), of.flat[v], exact);
        }
        constant += wide_sum(exact);
    }
}

// Bytes first … first + N of the codes of two slots, a lane each: those of one in bits 0 … 7, of the other in 16 … 23.
template <int N>
LKV_INLINE Wide<N> two_slots(const uint8_t* a, const uint8_t* b, int n_bytes) {
    if constexpr (N == wide_lanes || N == lanes) {
        uint8_t held[2][N] = {};
        if (n_bytes < N) {
            memcpy(held[0], a, static_cast<size_t>(n_bytes));
            memcpy(held[1], b, static_cast<size_t>(n_bytes));
            a = held[0];
            b = held[1];
        }
        return widened<N>(a) | widened<N>(b) << 16;
    }
}

// sums[r][k][lane] = Σ n·code of R rows, `P` planes from `plane` on.
template <int Bits, int N, int R, int P>
LKV_INLINE void plane_sums(const Tile& tile, int first_row, int first_byte, int n_bytes, int plane,
                           float (*sums)[8 / Bits][N]) {
    constexpr uint32_t mask = Planes<Bits>::levels * 0x00010001u;
    Wide<N> acc[R][P];
    LKV_UNROLL
    for (int r = 0; r < R; r++) {
        LKV_UNROLL
        for (int k = 0; k < P; k++) acc[r][k] = Wide<N>{};
    }
    const int offset = tile.offset + first_byte;
    for (int i = 0; i < n_pairs; i++) {
        const Wide<N> both =
            two_slots<N>(tile.rows.slot[2 * i] + offset, tile.rows.slot[2 * i + 1] + offset, n_bytes) >> (Bits * plane);
        LKV_UNROLL
        for (int k = 0; k < P; k++) {
            const Wide<N> codes = (both >> (Bits * k)) & mask;
            LKV_UNROLL
            for (int r = 0; r < R; r++) {
                acc[r][k] = add_pairs<N>(acc[r][k], codes, tile.pairs[first_row + r][i]);
            }
        }
    }
    LKV_UNROLL
    for (int r = 0; r < R; r++) {
        LKV_UNROLL
        for (int k = 0; k < P; k++) store_wide(&sums[r][plane + k][0], signed_to_f32<N>(acc[r][k]));
    }
}

// Channel of plane k of a byte.
template <int Bits>
constexpr int channel(int byte, int k) {
    if constexpr (Bits == 8) return byte;
    if constexpr (Bits == 4) return 16 * (byte / 8) + byte % 8 + 8 * k;
    if constexpr (Bits == 2) return 16 * (byte / 4) + byte % 4 + 4 * k;
    return 8 * byte + k;
}

// Lanes whose channels follow each other.
template <int Bits>
constexpr int run = Bits == 8   ? 8
                    : Bits == 4 ? 8
                    : Bits == 2 ? 4
                                : 1;

template <int Bits, int N>
void add_sums(const float (&sums)[8 / Bits][N], int n_bytes, float step, float constant, float* out) {
    for (int k = 0; k < 8 / Bits; k++) {
        for (int byte = 0; byte < n_bytes; byte += run<Bits>) {
            float* const to = out + channel<Bits>(byte, k);
            for (int i = 0; i < run<Bits>; i++) to[i] += sums[k][byte + i] * step + constant;
        }
    }
}

template <int Bits, int N, int R>
void byte_values(const Tile& tile, int first_row, int first_byte, int n_bytes, float* const* out) {
    constexpr int planes = 8 / Bits;
    constexpr int at_once = std::min(planes, most_planes);
    alignas(64) float sums[R][planes][N];
    for (int k = 0; k < planes; k += at_once) {
        plane_sums<Bits, N, R, at_once>(tile, first_row, first_byte, n_bytes, k, sums);
    }
    for (int r = 0; r < R; r++) {
        add_sums<Bits, N>(sums[r], n_bytes, tile.step[first_row + r], tile.constant[first_row + r],
                          out[first_row + r] + channel<Bits>(first_byte, 0));
    }
}

template <int Bits>
void segment_values(const Tile& tile, int width, float* const* out) {
    const int n_bytes = width * Bits / 8;
    const int n_blocks = (tile.n_rows + most_rows - 1) / most_rows;
    for (int block = 0, r = 0; block < n_blocks; block++) {
        const int n = (tile.n_rows - r + n_blocks - block - 1) / (n_blocks - block);
        with_rows<most_rows>(n, [&](auto rows) {
            constexpr int R = decltype(rows)::value;
            for (int byte = 0; byte < n_bytes;) {
                const int left = n_bytes - byte;
                if (left > lanes) {
                    byte_values<Bits, wide_lanes, R>(tile, r, byte, std::min(left, wide_lanes), out);
                    byte += wide_lanes;
                } else {
                    byte_values<Bits, lanes, R>(tile, r, byte, left, out);
                    byte += lanes;
                }
            }
        });
        r += n;
    }
}

}  // namespace

void coded_values(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, ReadAhead& ahead, int n_rows,
                  const float* const* weights, float* const* out) {
    Tile tile(rows, n_rows);
    for (const SegmentLayout& segment : segments_of(layout, group)) {
        tile.offset = segment.offset + Header::codes_at;
        const Headers headers(rows, segment.offset);
        float* to[max_coded_rows];
        for (int r = 0; r < n_rows; r++) {
            to[r] = out[r] + segment.column - group.column;
            weigh(headers, weights[r], tile.pairs[r], tile.step[r], tile.constant[r]);
        }
        with_bits(segment.format, [&](auto bits) {
            constexpr int Bits = decltype(bits)::value;
            for (int s = 0; s < tile_slots; s++) ahead.pull(AffineFormat<Bits>::bytes(segment.width));
            segment_values<Bits>(tile, segment.width, to);
        });
    }
}

}  // namespace lkv
