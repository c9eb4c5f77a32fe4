#include "ops/cpu/direct.h"

#include "cache/formats.h"
#include "ops/cpu/tile.h"

namespace lkv {

namespace {

constexpr int n_accumulators = 8;  // vectors kept in registers by both products

// Lane i of the result: the sum of the lanes of v[i].
LKV_INLINE f32x8 row_sums(const f32x8 (&v)[8]) {
    f32x8 a[4];
    for (int i = 0; i < 4; i++) {
        a[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    // a[i] lanes: (2i, 2i+1) partial sums, four times
    f32x8 b[2];
    for (int i = 0; i < 2; i++) {
        b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(a[2 * i], a[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    // b[i] lanes: rows 4i … 4i+3, low half and high half
    return __builtin_shufflevector(b[0], b[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(b[0], b[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

struct Segment {
    const uint8_t* const* rows;  // [64] first byte of a row
    int offset;                  // of the segment in a row
    int width;
    int first;  // channel of the group

    const uint8_t* at(int slot) const { return rows[slot] + offset; }
};

// R query rows against all slots of a tile; 8/R slots at a time.
template <class F, int R>
void segment_scores(const Segment& segment, const float* const* q, float* const* scores) {
    constexpr int S = n_accumulators / R;
    const int block = F::block > 0 ? F::block : segment.width;
    for (int first = 0; first < segment.width; first += block) {
        const int k = first / block;
        const int n_chunks = block / chunk_width;
        const float* x[R];
        float x_sum[R];
        for (int r = 0; r < R; r++) {
            x[r] = q[r] + segment.first + first;
            x_sum[r] = 0.0f;
            if constexpr (F::quantized) {
                for (int c = 0; c < block; c++) x_sum[r] += x[r][c];
            }
        }
        for (int s0 = 0; s0 < tile_slots; s0 += S) {
            const uint8_t* src[S];
            for (int s = 0; s < S; s++) src[s] = segment.at(s0 + s);
            f32x8 acc[n_accumulators] = {};
            for (int chunk = 0; chunk < n_chunks; chunk++) {
                for (int s = 0; s < S; s++) {
                    const f32x16 code = F::codes(src[s], first / chunk_width + chunk);
                    for (int r = 0; r < R; r++) {
                        const float* xr = x[r] + chunk * chunk_width;
                        acc[r * S + s] = fma8(code.lo, load8(xr), acc[r * S + s]);
                        acc[r * S + s] = fma8(code.hi, load8(xr + lanes), acc[r * S + s]);
                    }
                }
            }
            float products[n_accumulators];
            store8(products, row_sums(acc));
            for (int s = 0; s < S; s++) {
                const Affine a = F::affine(src[s], k);
                for (int r = 0; r < R; r++) {
                    float product = products[r * S + s];
                    for (int c = n_chunks * chunk_width; c < block; c++) product += F::code(src[s], c) * x[r][c];
                    if constexpr (F::quantized) product = product * a.scale + a.offset * x_sum[r];
                    scores[r][s0 + s] += product;
                }
            }
        }
    }
}

// N chunks of channels of R output rows at a time, over all slots of the tile.
template <class F, int R, int N>
LKV_INLINE void chunk_values(const Segment& segment, int chunk, const float (*weights)[tile_slots], float* const* out) {
    f32x8 acc[R][2 * N] = {};
    for (int s = 0; s < tile_slots; s++) {
        f32x8 weight[R];
        for (int r = 0; r < R; r++) weight[r] = splat(weights[r][s]);
        for (int n = 0; n < N; n++) {
            const f32x16 code = F::codes(segment.at(s), chunk + n);
            for (int r = 0; r < R; r++) {
                acc[r][2 * n] = fma8(code.lo, weight[r], acc[r][2 * n]);
                acc[r][2 * n + 1] = fma8(code.hi, weight[r], acc[r][2 * n + 1]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        float* dst = out[r] + chunk * chunk_width;
        for (int v = 0; v < 2 * N; v++) store8(dst + v * lanes, load8(dst + v * lanes) + acc[r][v]);
    }
}

template <class F, int R>
void segment_values(const Segment& segment, const float* const* weights, float* const* out) {
    constexpr int N = n_accumulators / (2 * R);
    const int block = F::block > 0 ? F::block : segment.width;
    float* dst[R];
    for (int r = 0; r < R; r++) dst[r] = out[r] + segment.first;
    for (int first = 0; first < segment.width; first += block) {
        float scaled[R][tile_slots];
        float constant[R] = {};
        for (int s = 0; s < tile_slots; s++) {
            const Affine a = F::affine(segment.at(s), first / block);
            for (int r = 0; r < R; r++) {
                scaled[r][s] = weights[r][s] * a.scale;
                constant[r] += weights[r][s] * a.offset;
            }
        }
        const int begin = first / chunk_width;
        const int end = begin + block / chunk_width;
        int chunk = begin;
        for (; chunk + N <= end; chunk += N) chunk_values<F, R, N>(segment, chunk, scaled, dst);
        for (; chunk < end; chunk++) chunk_values<F, R, 1>(segment, chunk, scaled, dst);
        for (int c = end * chunk_width; c < first + block; c++) {
            for (int s = 0; s < tile_slots; s++) {
                const float code = F::code(segment.at(s), c);
                for (int r = 0; r < R; r++) dst[r][c] += scaled[r][s] * code;
            }
        }
        if constexpr (F::quantized) {
            for (int r = 0; r < R; r++) {
                for (int c = first; c < first + block; c++) dst[r][c] += constant[r];
            }
        }
    }
}

// Rows in blocks of 4, 2 and 1.
template <class Call>
void for_row_blocks(int n_rows, Call call) {
    int r = 0;
    for (; r + 4 <= n_rows; r += 4) call(std::integral_constant<int, 4>{}, r);
    for (; r + 2 <= n_rows; r += 2) call(std::integral_constant<int, 2>{}, r);
    for (; r < n_rows; r++) call(std::integral_constant<int, 1>{}, r);
}

template <class Call>
void for_segments(const RowLayout& layout, const GroupLayout& group, const uint8_t* const* rows, Call call) {
    for (int i = group.first_segment; i < group.first_segment + group.n_segments; i++) {
        const SegmentLayout& s = layout.segments[i];
        const Segment segment{rows, s.offset, s.width, s.column - group.column};
        with_format(static_cast<Format>(s.format), [&](auto f) { call(f, segment); });
    }
}

}  // namespace

void direct_scores(const RowLayout& layout, const GroupLayout& group, const uint8_t* const* rows, int n_rows,
                   const float* const* q, float* const* scores) {
    for (int r = 0; r < n_rows; r++) {
        for (int s = 0; s < tile_slots; s++) scores[r][s] = 0.0f;
    }
    for_segments(layout, group, rows, [&](auto f, const Segment& segment) {
        for_row_blocks(n_rows, [&](auto n, int r) {
            segment_scores<decltype(f), decltype(n)::value>(segment, q + r, scores + r);
        });
    });
}

void direct_values(const RowLayout& layout, const GroupLayout& group, const uint8_t* const* rows, int n_rows,
                   const float* const* weights, float* const* out) {
    for_segments(layout, group, rows, [&](auto f, const Segment& segment) {
        for_row_blocks(n_rows, [&](auto n, int r) {
            segment_values<decltype(f), decltype(n)::value>(segment, weights + r, out + r);
        });
    });
}

}  // namespace lkv
