#include "ops/cpu/codes/code_values.h"

#include "ops/cpu/codes/packs.h"

namespace lkv {

namespace {

constexpr int most_rows = wide_lanes == 16 ? 10 : 5;  // at once, with most_vectors each: their sums stay in registers
constexpr int most_vectors = 2;
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

// The scales and minima of one segment in all slots of a tile.
struct Headers {
    static constexpr int n_vectors = tile_slots / wide_lanes;
    f32xw scale[n_vectors];
    f32xw ratio[n_vectors];  // of minimum and scale
    f32xw flat[n_vectors];   // minimum where the scale is 0
    bool any_flat = false;

    // A segment of a group that has the scales, in byte `byte` of its word; a minimum of 1 per scale stands for what is added to every code.
    Headers(const uint32_t* words, int byte) {
        for (int v = 0; v < n_vectors; v++) {
            scale[v] = half_to_f32((load_wide<u32xw>(words + v * wide_lanes) >> 8 * byte & 0xffu) << 7);
            ratio[v] = f32xw{} + 1.0f;
            flat[v] = f32xw{};
        }
    }

    explicit Headers(const uint32_t* words) {
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
void weigh(const Headers& headers, const float* weights, int32_t* pairs, float& step, float& constant) {
    f32xw product[Headers::n_vectors];
    f32xw most{};
    for (int v = 0; v < Headers::n_vectors; v++) {
        product[v] = load_wide<f32xw>(weights + v * wide_lanes) * headers.scale[v];
        most = product[v] > most ? product[v] : most;
    }
    const float reach = wide_max(most);
    step = reach / 32767.0f;
    const f32xw inverse = f32xw{} + (reach > 0.0f ? 32767.0f / reach : 0.0f);
    f32xw whole{};
    i32xw n[Headers::n_vectors];
    for (int v = 0; v < Headers::n_vectors; v++) {
        n[v] = __builtin_convertvector(fma_wide(product[v], inverse, f32xw{} + 0.5f), i32xw);
        whole = fma_wide(__builtin_convertvector(n[v], f32xw), headers.ratio[v], whole);
    }
    for (int v = 0; v < Headers::n_vectors; v += 2) {
        store_wide(pairs + v * wide_lanes / 2, narrowed(n[v], n[v + 1]));
    }
    constant = wide_sum(whole) * step;
    if (headers.any_flat) {
        f32xw exact{};
        for (int v = 0; v < Headers::n_vectors; v++) {
            exact = fma_wide(load_wide<f32xw>(weights + v * wide_lanes), headers.flat[v], exact);
        }
        constant += wide_sum(exact);
    }
}

// How B bytes of a segment's codes fill vectors: N lanes, each with another byte or another plane of it.
template <int Bits, int B>
struct Lanes {
    static constexpr int planes = 8 / Bits;
    static constexpr int N = std::min(wide_lanes, std::max(lanes, planes* B));
    static constexpr int in_one = std::min(planes, N / B);  // planes in a vector
    static constexpr int n_vectors = planes / in_one;

    static constexpr Wide<N> shifts() {
        Wide<N> v{};
        for (int i = 0; i < N; i++) v[i] = static_cast<uint32_t>(Bits * (i / B % planes));
        return v;
    }

    // The codes of two slots: of one in bits 0 … 7, of the other in 16 … 23, the vector's first plane lowest.
    static LKV_INLINE Wide<N> of_two(const uint8_t* a, const uint8_t* b) {
        const Wide<N> both = widened<N, B>(a) | widened<N, B>(b) << 16;
        if constexpr (in_one == 1) return both;
        return both >> shifts();
    }
};

// sums[r][vector][lane] = Σ n·code of R rows, V vectors from `first` on.
template <int Bits, int B, int R, int V>
LKV_INLINE void vector_sums(const Tile& tile, int first_row, int byte, int first,
                            float (*sums)[Lanes<Bits, B>::n_vectors][Lanes<Bits, B>::N]) {
    using L = Lanes<Bits, B>;
    constexpr int N = L::N;
    constexpr uint32_t mask = Planes<Bits>::levels * 0x00010001u;
    Wide<N> acc[R][V];
    LKV_UNROLL
    for (int r = 0; r < R; r++) {
        LKV_UNROLL
        for (int v = 0; v < V; v++) acc[r][v] = Wide<N>{};
    }
    const int offset = tile.offset + byte;
    for (int i = 0; i < n_pairs; i++) {
        const Wide<N> both =
            L::of_two(tile.rows.slot[2 * i] + offset, tile.rows.slot[2 * i + 1] + offset) >> (Bits * L::in_one * first);
        LKV_UNROLL
        for (int v = 0; v < V; v++) {
            const Wide<N> codes = (both >> (Bits * L::in_one * v)) & mask;
            LKV_UNROLL
            for (int r = 0; r < R; r++) {
                acc[r][v] = add_pairs<N>(acc[r][v], codes, tile.pairs[first_row + r][i]);
            }
        }
    }
    LKV_UNROLL
    for (int r = 0; r < R; r++) {
        LKV_UNROLL
        for (int v = 0; v < V; v++) store_wide(&sums[r][first + v][0], signed_to_f32<N>(acc[r][v]));
    }
}

// out += sums · step + constant, of the first n_bytes of B bytes.
template <int Bits, int B>
void add_sums(const float* sums, int n_bytes, float step, float constant, float* out) {
    using L = Lanes<Bits, B>;
    if constexpr (Bits == 1 && B <= lanes) {
        f32x8 of_byte[lanes];  // [plane][byte], then transposed
        for (int plane = 0; plane < lanes; plane++) {
            if constexpr (B == lanes) {
                of_byte[plane] = load8(sums + plane * B);
            } else {  // in a register: eight that are read after four were written wait for both
                using f32x4 = float __attribute__((vector_size(16)));
                const auto four = load_wide<f32x4>(sums + plane * B);
                of_byte[plane] = __builtin_shufflevector(four, four, 0, 1, 2, 3, 0, 1, 2, 3);
            }
        }
        transpose8(of_byte);
        for (int byte = 0; byte < n_bytes; byte++) {
            store8(out + 8 * byte, load8(out + 8 * byte) + fma8(of_byte[byte], splat(step), splat(constant)));
        }
        return;
    }
    constexpr int run = Bits == 1 ? 1 : Bits == 2 ? 4 : std::min(8, B);  // lanes whose channels follow each other
    for (int plane = 0; plane < L::planes; plane++) {
        const float* const from = sums + plane / L::in_one * L::N + plane % L::in_one * B;
        for (int byte = 0; byte < n_bytes; byte += run) {
            float* const to = out + channel_of<Bits>(byte, plane);
            for (int i = 0; i < run; i++) to[i] += from[byte + i] * step + constant;
        }
    }
}

template <int Bits, int B, int R>
void byte_values(const Tile& tile, int first_row, int byte, int n_bytes, float* const* out) {
    using L = Lanes<Bits, B>;
    constexpr int at_once = std::min(L::n_vectors, most_vectors);
    alignas(64) float sums[R][L::n_vectors][L::N];
    for (int v = 0; v < L::n_vectors; v += at_once) {
        vector_sums<Bits, B, R, at_once>(tile, first_row, byte, v, sums);
    }
    for (int r = 0; r < R; r++) {
        add_sums<Bits, B>(&sums[r][0][0], n_bytes, tile.step[first_row + r], tile.constant[first_row + r],
                          out[first_row + r] + channel_of<Bits>(byte, 0));
    }
}

template <int Bits, int R>
void row_values(const Tile& tile, int first_row, int n_bytes, float* const* out) {
    for (int byte = 0; byte < n_bytes;) {
        const int left = n_bytes - byte;
        if (left >= wide_lanes) {
            byte_values<Bits, wide_lanes, R>(tile, first_row, byte, wide_lanes, out);
            byte += wide_lanes;
        } else if (left >= lanes) {
            byte_values<Bits, lanes, R>(tile, first_row, byte, lanes, out);
            byte += lanes;
        } else {
            // 2 bytes, of 16 codes of one bit: of the next two, which a row has, no channel is made
            byte_values<Bits, 4, R>(tile, first_row, byte, std::min(left, 4), out);
            byte += 4;
        }
    }
}

// A chunk of 16 channels in widths of two planes: N lanes a vector, channels in their order.
template <int Bits>
struct ChunkLanes {
    using P = Planes<Bits>;
    static constexpr int N = wide_lanes;
    static constexpr int n_vectors = chunk_width / N;
    static constexpr uint32_t ones = 0x00010001u;

    // The codes of two slots, as of_two.
    static LKV_INLINE Wide<N> codes(const uint8_t* a, const uint8_t* b, int vector) {
        if constexpr (P::single) {
            const Wide<N> low = P::nibble ? plane<4, 8>(a, b, vector) : plane<2, 4>(a, b, vector);
            const uint32_t bits = load_u16(a + P::single_at) | uint32_t{load_u16(b + P::single_at)} << 16;
            return low | ((Wide<N>{} + bits) >> (lane_numbers() + static_cast<uint32_t>(N * vector)) & ones)
                             << P::single_shift;
        }
        return plane<4, 8>(a, b, vector) | plane<2, 4>(a + P::pair_at, b + P::pair_at, vector) << P::pair_shift;
    }

private:
    template <int PlaneBits, int B>
    static LKV_INLINE Wide<N> plane(const uint8_t* a, const uint8_t* b, int vector) {
        using L = Lanes<PlaneBits, B>;
        static_assert(L::N == N && L::n_vectors == n_vectors);
        return L::of_two(a, b) >> (PlaneBits * L::in_one * vector) & Planes<PlaneBits>::levels * ones;
    }
    static constexpr Wide<N> lane_numbers() {
        Wide<N> v{};
        for (int i = 0; i < N; i++) v[i] = static_cast<uint32_t>(i);
        return v;
    }
};

template <int Bits, int R>
void chunk_values(const Tile& tile, int first_row, int chunk, float* const* out) {
    using C = ChunkLanes<Bits>;
    Wide<C::N> acc[R][C::n_vectors] = {};
    const int offset = tile.offset + chunk * Planes<Bits>::chunk_bytes;
    for (int i = 0; i < n_pairs; i++) {
        LKV_UNROLL
        for (int v = 0; v < C::n_vectors; v++) {
            const Wide<C::N> codes = C::codes(tile.rows.slot[2 * i] + offset, tile.rows.slot[2 * i + 1] + offset, v);
            LKV_UNROLL
            for (int r = 0; r < R; r++) acc[r][v] = add_pairs<C::N>(acc[r][v], codes, tile.pairs[first_row + r][i]);
        }
    }
    LKV_UNROLL
    for (int r = 0; r < R; r++) {
        LKV_UNROLL
        for (int v = 0; v < C::n_vectors; v++) {
            float* const to = out[first_row + r] + chunk * chunk_width + v * C::N;
            const f32xw step = f32xw{} + tile.step[first_row + r];
            const f32xw before = load_wide<f32xw>(to) + tile.constant[first_row + r];
            store_wide(to, fma_wide(signed_to_f32<C::N>(acc[r][v]), step, before));
        }
    }
}

template <int Bits>
void segment_values(const Tile& tile, int width, float* const* out) {
    for_even_blocks<most_rows>(tile.n_rows, [&](auto rows, int r) {
        constexpr int R = decltype(rows)::value;
        if constexpr (has_two_planes<Bits>) {
            for (int chunk = 0; chunk < width / chunk_width; chunk++) chunk_values<Bits, R>(tile, r, chunk, out);
        } else {
            row_values<Bits, R>(tile, r, width * Bits / 8, out);
        }
    });
}

}  // namespace

void coded_values(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, ReadAhead& ahead, int n_rows,
                  const float* const* weights, float* const* out) {
    Tile tile(rows, n_rows);
    float steps[max_coded_rows];
    float sums[max_coded_rows];
    const auto weigh_all = [&](const Headers& headers) {
        for (int r = 0; r < n_rows; r++) weigh(headers, weights[r], tile.pairs[r], steps[r], sums[r]);
    };
    uint32_t words[tile_slots];  // scale and minimum, or the group's scales
    int words_at = -1;
    int weighed_at = -1;  // scales that the weights are multiplied with
    for (const SegmentLayout& segment : segments_of(layout, group)) {
        const auto scaled = scaled_by_group(segment);
        if (segment.scales != words_at) {
            words_at = segment.scales;
            for (int s = 0; s < tile_slots; s++) memcpy(&words[s], rows.slot[s] + words_at, sizeof words[s]);
        }
        if (!scaled) {
            weigh_all(Headers(words));
        } else if (scaled->scale_at != weighed_at) {
            weigh_all(Headers(words, scaled->scale_at - segment.scales));
            weighed_at = scaled->scale_at;
        }
        float* to[max_coded_rows];
        for (int r = 0; r < n_rows; r++) {
            to[r] = out[r] + segment.column - group.column;
            tile.step[r] = scaled ? steps[r] * scaled->step : steps[r];
            tile.constant[r] = scaled ? sums[r] * scaled->bottom : sums[r];
        }
        tile.offset = codes_at(segment);
        const int bytes = format_bytes(static_cast<Format>(segment.format), segment.width);
        for (int s = 0; s < tile_slots; s++) ahead.pull(bytes);
        with_bits(segment.format, [&](auto bits) { segment_values<decltype(bits)::value>(tile, segment.width, to); });
    }
}

}  // namespace lkv
