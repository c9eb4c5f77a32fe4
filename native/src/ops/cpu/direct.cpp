#include "ops/cpu/direct.h"

#include <algorithm>

#include "cache/formats.h"

namespace lkv {

namespace {

constexpr int n_accumulators = 8;  // vectors kept in registers by both products

// A function of its own, whatever else the compiler brings into its caller: with others in one function its registers do not suffice.
#define LKV_ALONE __attribute__((noinline))

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
    const TileRows& rows;
    int offset;  // of the segment in a row
    int scales;  // likewise of its scales
    int width;
    int first;  // channel of the group

    ReadAhead& ahead;

    const uint8_t* at(int slot) const { return rows.slot[slot] + offset; }
};

// Scale and offset of one block of channels, for the slots of the tile.
template <class F>
struct TileAffine {
    float scale[tile_slots];
    float offset[tile_slots];

    TileAffine(const Segment& segment, int block) {
        for (int s = 0; s < tile_slots; s++) {
            const Affine a = F::affine(segment.rows.slot[s] + segment.scales, block);
            scale[s] = a.scale;
            offset[s] = a.offset;
        }
    }
};

float channel_sum(const float* x, int n) {
    f32x8 total{};
    for (int i = 0; i + lanes <= n; i += lanes) total += load8(x + i);
    return lkv::sum(total);
}

// About what n chunks of a row occupy.
template <class F>
constexpr int bytes_of_chunks(int n) {
    return F::bytes(2 * n * chunk_width) / 2;
}

// R query rows against S = 8/R slots: products[r · S + s] = Σ q·code.
template <class F, int R>
LKV_INLINE f32x8 code_products(const Segment& segment, int slot, int first_chunk, int n_chunks, const float* const* x) {
    constexpr int S = n_accumulators / R;
    const uint8_t* src[S];
    const float* row[R];
    const int bytes = bytes_of_chunks<F>(n_chunks);
    LKV_UNROLL
    for (int s = 0; s < S; s++) {
        src[s] = segment.at(slot + s);
        segment.ahead.pull(bytes);
    }
    LKV_UNROLL
    for (int r = 0; r < R; r++) row[r] = x[r];
    f32x8 acc[n_accumulators] = {};
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        LKV_UNROLL
        for (int s = 0; s < S; s++) {
            f32x16 code = F::codes(src[s], first_chunk + chunk);
            keep_in_register(code.lo);
            keep_in_register(code.hi);
            LKV_UNROLL
            for (int r = 0; r < R; r++) {
                const float* xr = row[r] + chunk * chunk_width;
                acc[r * S + s] = fma8(code.lo, load8(xr), acc[r * S + s]);
                acc[r * S + s] = fma8(code.hi, load8(xr + lanes), acc[r * S + s]);
            }
        }
    }
    return row_sums(acc);
}

template <class F, int R>
LKV_ALONE void segment_scores(const Segment& segment, const float* const* q, float* const* scores) {
    constexpr int S = n_accumulators / R;
    const int block = F::block > 0 ? F::block : segment.width;
    const int n_chunks = block / chunk_width;
    for (int first = 0; first < segment.width; first += block) {
        const float* x[R];
        for (int r = 0; r < R; r++) x[r] = q[r] + segment.first + first;
        float product[R][tile_slots];
        for (int s = 0; s < tile_slots; s += S) {
            float products[n_accumulators];
            store8(products, code_products<F, R>(segment, s, first / chunk_width, n_chunks, x));
            for (int r = 0; r < R; r++) memcpy(&product[r][s], &products[r * S], S * sizeof(float));
        }
        if constexpr (F::width_multiple < chunk_width) {
            for (int s = 0; s < tile_slots; s++) {
                for (int c = n_chunks * chunk_width; c < block; c++) {
                    for (int r = 0; r < R; r++) product[r][s] += F::code(segment.at(s), c) * x[r][c];
                }
            }
        }
        if constexpr (F::quantized) {
            const TileAffine<F> affine(segment, first / block);
            for (int r = 0; r < R; r++) {
                const f32x8 x_sum = splat(channel_sum(x[r], block));
                for (int s = 0; s < tile_slots; s += lanes) {
                    const f32x8 constant = fma8(load8(affine.offset + s), x_sum, load8(scores[r] + s));
                    store8(scores[r] + s, fma8(load8(product[r] + s), load8(affine.scale + s), constant));
                }
            }
        } else {
            for (int r = 0; r < R; r++) {
                for (int s = 0; s < tile_slots; s += lanes) {
                    store8(scores[r] + s, load8(scores[r] + s) + load8(product[r] + s));
                }
            }
        }
    }
}

// For a format of token blocks: scale and minimum belong to the channels, so they go to the queries, once per block.
template <class F, int R>
LKV_ALONE void token_block_scores(const Segment& segment, int64_t stride, const float* const* q, float* const* scores) {
    constexpr int S = n_accumulators / R;
    constexpr int span = 128;  // channels at a time
    for (int b = 0; b < tile_slots / token_block_slots; b++) {
        if (segment.rows.block[b] == nullptr) continue;
        for (int first = 0; first < segment.width; first += span) {
            const int n = std::min(span, segment.width - first);
            float scale[span];
            float minimum[span];
            F::affine(segment.rows.block[b] + segment.offset, stride, segment.width, first, n, scale, minimum);
            float scaled[R][span];
            float constant[R];
            const float* x[R];
            for (int r = 0; r < R; r++) {
                const float* const qr = q[r] + segment.first + first;
                f32x8 total{};
                for (int c = 0; c < n; c += lanes) {
                    const f32x8 v = load8(qr + c);
                    store8(scaled[r] + c, v * load8(scale + c));
                    total = fma8(v, load8(minimum + c), total);
                }
                constant[r] = lkv::sum(total);
                x[r] = scaled[r];
            }
            float product[R][token_block_slots];
            for (int s = 0; s < token_block_slots; s += S) {
                float products[n_accumulators];
                store8(products, code_products<F, R>(segment, b * token_block_slots + s, first / chunk_width,
                                                     n / chunk_width, x));
                for (int r = 0; r < R; r++) memcpy(&product[r][s], &products[r * S], S * sizeof(float));
            }
            for (int r = 0; r < R; r++) {
                float* const out = scores[r] + b * token_block_slots;
                for (int s = 0; s < token_block_slots; s += lanes) {
                    store8(out + s, load8(out + s) + load8(product[r] + s) + splat(constant[r]));
                }
            }
        }
    }
}

// Chunks that share one scale; for formats with one scale per segment, any number.
template <class F>
constexpr int chunks_per_block = F::block > 0 ? F::block / chunk_width : 1 << 20;

// N chunks of channels of R output rows, over all slots of the tile: out += Σ weight·code + constant.
// weights, constants: chunk n of row r uses entry n / chunks_per_block · R + r.
template <class F, int R, int N>
LKV_INLINE void chunk_values(const Segment& segment, int chunk, const float* const* weights, const float* constants,
                             float* const* out) {
    constexpr int n_weights = (N + chunks_per_block<F> - 1) / chunks_per_block<F> * R;
    const float* row[n_weights];
    LKV_UNROLL
    for (int i = 0; i < n_weights; i++) row[i] = weights[i];
    f32x8 acc[2 * N * R] = {};
    for (int s = 0; s < tile_slots; s++) {
        const uint8_t* src = segment.at(s);
        segment.ahead.pull(bytes_of_chunks<F>(N));
        LKV_UNROLL
        for (int n = 0; n < N; n++) {
            f32x16 code = F::codes(src, chunk + n);
            keep_in_register(code.lo);
            keep_in_register(code.hi);
            LKV_UNROLL
            for (int r = 0; r < R; r++) {
                const f32x8 weight = splat(row[n / chunks_per_block<F> * R + r][s]);
                acc[2 * (n * R + r)] = fma8(code.lo, weight, acc[2 * (n * R + r)]);
                acc[2 * (n * R + r) + 1] = fma8(code.hi, weight, acc[2 * (n * R + r) + 1]);
            }
        }
    }
    LKV_UNROLL
    for (int n = 0; n < N; n++) {
        LKV_UNROLL
        for (int r = 0; r < R; r++) {
            float* dst = out[r] + (chunk + n) * chunk_width;
            const f32x8 constant = splat(constants[n / chunks_per_block<F> * R + r]);
            store8(dst, load8(dst) + acc[2 * (n * R + r)] + constant);
            store8(dst + lanes, load8(dst + lanes) + acc[2 * (n * R + r) + 1] + constant);
        }
    }
}

template <class F, int R>
LKV_ALONE void segment_values(const Segment& segment, const float* const* weights, float* const* out) {
    constexpr int N = n_accumulators / (2 * R);
    constexpr int block_chunks = chunks_per_block<F>;
    constexpr int n_blocks = (N + block_chunks - 1) / block_chunks;  // scales in use at once
    const int n_chunks = segment.width / chunk_width;
    const int span = F::block > 0 ? std::max(N, block_chunks) : n_chunks;
    float* dst[R];
    for (int r = 0; r < R; r++) dst[r] = out[r] + segment.first;
    for (int first = 0; first < n_chunks; first += span) {
        const int n_here = std::min(span, n_chunks - first);
        float scaled[n_blocks * R][tile_slots];
        float constants[n_blocks * R] = {};
        const float* weight[n_blocks * R];
        for (int i = 0; i < n_blocks * R; i++) weight[i] = weights[i % R];
        if constexpr (F::quantized) {
            for (int b = 0; b * block_chunks < n_here; b++) {
                const TileAffine<F> affine(segment, first / block_chunks + b);
                for (int r = 0; r < R; r++) {
                    f32x8 total{};
                    for (int s = 0; s < tile_slots; s += lanes) {
                        const f32x8 w = load8(weights[r] + s);
                        store8(scaled[b * R + r] + s, w * load8(affine.scale + s));
                        total = fma8(w, load8(affine.offset + s), total);
                    }
                    constants[b * R + r] = lkv::sum(total);
                    weight[b * R + r] = scaled[b * R + r];
                }
            }
        }
        int c = 0;
        for (; c + N <= n_here; c += N) {
            const int i = c / block_chunks * R;
            chunk_values<F, R, N>(segment, first + c, weight + i, constants + i, dst);
        }
        for (; c < n_here; c++) {
            const int i = c / block_chunks * R;
            chunk_values<F, R, 1>(segment, first + c, weight + i, constants + i, dst);
        }
    }
    if constexpr (F::width_multiple < chunk_width) {
        for (int c = n_chunks * chunk_width; c < segment.width; c++) {
            for (int s = 0; s < tile_slots; s++) {
                for (int r = 0; r < R; r++) dst[r][c] += weights[r][s] * F::code(segment.at(s), c);
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
void for_segments(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, ReadAhead& ahead,
                  Call call) {
    for (int i = group.first_segment; i < group.first_segment + group.n_segments; i++) {
        const SegmentLayout& s = layout.segments[i];
        call(static_cast<Format>(s.format), Segment{rows, s.offset, s.scales, s.width, s.column - group.column, ahead});
    }
}

}  // namespace

void direct_scores(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, ReadAhead& ahead,
                   int n_rows, const float* const* q, float* const* scores) {
    for (int r = 0; r < n_rows; r++) {
        for (int s = 0; s < tile_slots; s++) scores[r][s] = 0.0f;
    }
    for_segments(layout, group, rows, ahead, [&](Format format, const Segment& segment) {
        if (format_in_token_blocks(format)) {
            with_token_block_format(format, [&](auto f) {
                for_row_blocks(n_rows, [&](auto n, int r) {
                    token_block_scores<decltype(f), decltype(n)::value>(segment, layout.row_bytes, q + r, scores + r);
                });
            });
            return;
        }
        with_format(format, [&](auto f) {
            for_row_blocks(n_rows, [&](auto n, int r) {
                segment_scores<decltype(f), decltype(n)::value>(segment, q + r, scores + r);
            });
        });
    });
}

void direct_values(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, ReadAhead& ahead,
                   int n_rows, const float* const* weights, float* const* out) {
    for_segments(layout, group, rows, ahead, [&](Format format, const Segment& segment) {
        with_format(format, [&](auto f) {
            for_row_blocks(n_rows, [&](auto n, int r) {
                segment_values<decltype(f), decltype(n)::value>(segment, weights + r, out + r);
            });
        });
    });
}

}  // namespace lkv
