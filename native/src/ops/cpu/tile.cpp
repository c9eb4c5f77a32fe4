#include "ops/cpu/tile.h"

#include <algorithm>

#include "cache/formats.h"
#include "ops/cpu/gemm.h"

namespace lkv {

namespace {

static_assert(chunk_width == panel_width, "a chunk of channels is a panel row");

// The values of one chunk of channels of one row.
template <class F>
LKV_INLINE f32x16 values(const uint8_t* segment, int chunk, Affine a) {
    const f32x16 v = F::codes(segment, chunk);
    if constexpr (F::quantized) {
        return {fma8(v.lo, splat(a.scale), splat(a.offset)), fma8(v.hi, splat(a.scale), splat(a.offset))};
    }
    return v;
}

template <class F>
constexpr int chunks_per_block(int width) {
    return F::block > 0 ? F::block / chunk_width : std::max(1, width / chunk_width);
}

// rows: [64]. dst: channel 0 of the segment, panels `panel` floats apart.
template <class F>
void segment_by_channel(const uint8_t* const* rows, const SegmentLayout& segment, float* dst, ptrdiff_t panel) {
    const int offset = segment.offset;
    const int width = segment.width;
    const int n_chunks = width / chunk_width;
    for (int s0 = 0; s0 < tile_slots; s0 += lanes) {
        float* out = dst + s0 / panel_width * panel + s0 % panel_width;
        Affine a[lanes] = {};
        for (int chunk = 0; chunk < n_chunks; chunk++) {
            f32x8 lo[lanes];
            f32x8 hi[lanes];
            for (int s = 0; s < lanes; s++) {
                if (chunk % chunks_per_block<F>(width) == 0) {
                    a[s] = F::affine(rows[s0 + s] + segment.scales, chunk / chunks_per_block<F>(width));
                }
                const f32x16 v = values<F>(rows[s0 + s] + offset, chunk, a[s]);
                lo[s] = v.lo;
                hi[s] = v.hi;
            }
            transpose8(lo);
            transpose8(hi);
            for (int c = 0; c < lanes; c++) {
                store8(out + (chunk * chunk_width + c) * panel_width, lo[c]);
                store8(out + (chunk * chunk_width + lanes + c) * panel_width, hi[c]);
            }
        }
        for (int c = n_chunks * chunk_width; c < width; c++) {
            for (int s = 0; s < lanes; s++) out[c * panel_width + s] = F::code(rows[s0 + s] + offset, c);
        }
    }
}

// dst: channel `first` of the group is the segment's first.
template <class F>
void segment_by_slot(const uint8_t* const* rows, const SegmentLayout& segment, int first, float* dst) {
    const int offset = segment.offset;
    const int width = segment.width;
    const bool aligned = first % panel_width == 0;
    const int n_chunks = aligned ? width / chunk_width : 0;
    for (int s = 0; s < tile_slots; s++) {
        Affine a{};
        for (int chunk = 0; chunk < n_chunks; chunk++) {
            if (chunk % chunks_per_block<F>(width) == 0) {
                a = F::affine(rows[s] + segment.scales, chunk / chunks_per_block<F>(width));
            }
            const f32x16 v = values<F>(rows[s] + offset, chunk, a);
            float* out = dst + ((first / panel_width + chunk) * tile_slots + s) * panel_width;
            store8(out, v.lo);
            store8(out + lanes, v.hi);
        }
        for (int i = n_chunks * chunk_width; i < width; i++) {
            const Affine b = F::affine(rows[s] + segment.scales, F::block > 0 ? i / F::block : 0);
            const int c = first + i;
            dst[(c / panel_width * tile_slots + s) * panel_width + c % panel_width] =
                F::code(rows[s] + offset, i) * b.scale + b.offset;
        }
    }
}

// The same for a format of token blocks. offset: of the segment in a row.
template <class F>
void token_block_by_channel(const TileRows& rows, int offset, int width, int64_t stride, float* dst, ptrdiff_t panel) {
    constexpr int span = 128;  // channels whose scale and minimum are at hand
    for (int b = 0; b < tile_slots / token_block_slots; b++) {
        for (int first = 0; first < width; first += span) {
            const int n = std::min(span, width - first);
            float scale[span] = {};
            float minimum[span] = {};
            if (rows.block[b] != nullptr) {
                F::affine(rows.block[b] + offset, stride, width, first, n, scale, minimum);
            }
            for (int s0 = b * token_block_slots; s0 < (b + 1) * token_block_slots; s0 += lanes) {
                float* out = dst + s0 / panel_width * panel + s0 % panel_width + first * panel_width;
                for (int c0 = 0; c0 < n; c0 += chunk_width) {
                    f32x8 lo[lanes];
                    f32x8 hi[lanes];
                    for (int s = 0; s < lanes; s++) {
                        const f32x16 code = F::codes(rows.slot[s0 + s] + offset, (first + c0) / chunk_width);
                        lo[s] = fma8(code.lo, load8(scale + c0), load8(minimum + c0));
                        hi[s] = fma8(code.hi, load8(scale + c0 + lanes), load8(minimum + c0 + lanes));
                    }
                    transpose8(lo);
                    transpose8(hi);
                    for (int c = 0; c < lanes; c++) {
                        store8(out + (c0 + c) * panel_width, lo[c]);
                        store8(out + (c0 + lanes + c) * panel_width, hi[c]);
                    }
                }
            }
        }
    }
}

}  // namespace

void load_by_channel(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, float* dst) {
    const ptrdiff_t panel = ptrdiff_t{group.kept} * panel_width;
    for (int i = group.first_segment; i < group.first_segment + group.n_segments; i++) {
        const SegmentLayout& segment = layout.segments[i];
        float* const out = dst + (segment.column - group.column) * panel_width;
        if (format_in_token_blocks(static_cast<Format>(segment.format))) {
            with_token_block_format(static_cast<Format>(segment.format), [&](auto f) {
                token_block_by_channel<decltype(f)>(rows, segment.offset, segment.width, layout.row_bytes, out, panel);
            });
            continue;
        }
        with_format(static_cast<Format>(segment.format),
                    [&](auto f) { segment_by_channel<decltype(f)>(rows.slot, segment, out, panel); });
    }
}

void load_by_slot(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, float* dst) {
    if (group.kept % panel_width != 0) {
        constexpr int panel = tile_slots * panel_width;
        std::fill_n(dst + group.kept / panel_width * panel, panel, 0.0f);
    }
    for (int i = group.first_segment; i < group.first_segment + group.n_segments; i++) {
        const SegmentLayout& segment = layout.segments[i];
        with_format(static_cast<Format>(segment.format), [&](auto f) {
            segment_by_slot<decltype(f)>(rows.slot, segment, segment.column - group.column, dst);
        });
    }
}

}  // namespace lkv
