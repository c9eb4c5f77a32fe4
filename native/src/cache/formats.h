// The row formats. One line of the tables below and one header in formats/ add a format; the order is the file's
// (`enums.format` in the schema).
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cache/formats/affine.h"
#include "cache/formats/bf16.h"
#include "cache/formats/channel.h"
#include "cache/formats/f16.h"
#include "cache/formats/f32.h"
#include "cache/formats/iq4_nl.h"
#include "cache/formats/q4_0.h"
#include "cache/formats/q4_1.h"
#include "cache/formats/q5_0.h"
#include "cache/formats/q5_1.h"
#include "cache/formats/q8_0.h"

// X(name, type), after `none`: a token's row stands alone
#define LKV_FORMATS_1_TO_8(X) \
    X(f16, F16)               \
    X(q8, AffineFormat<8>)    \
    X(q6, AffineFormat<6>)    \
    X(q5, AffineFormat<5>)    \
    X(q4, AffineFormat<4>)    \
    X(q3, AffineFormat<3>)    \
    X(q2, AffineFormat<2>)    \
    X(q1, AffineFormat<1>)

// The numbers 9 to 15 stay taken: g8, g6 … g1 had one scale per segment on a symmetric grid, and saved states may name them.
#define LKV_FORMATS_FROM_16(X) \
    X(q8_0, Q8_0)              \
    X(q4_0, Q4_0)              \
    X(f32, F32)

#define LKV_STORED_FORMATS(X) LKV_FORMATS_1_TO_8(X) LKV_FORMATS_FROM_16(X)

// The same, after those: tokens are written in blocks of 32 that share numbers (formats/channel.h)
#define LKV_BLOCK_FORMATS(X) \
    X(c8, ChannelFormat<8>)  \
    X(c4, ChannelFormat<4>)  \
    X(c3, ChannelFormat<3>)  \
    X(c2, ChannelFormat<2>)

// The other cache types of llama.cpp, of single rows again. They are there to be compared with: on a GPU one reader, channel by
// channel, serves them all (ops/cuda/rows/dequant.cuh).
#define LKV_STOCK_FORMATS(X) \
    X(bf16, BF16)            \
    X(q4_1, Q4_1)            \
    X(q5_0, Q5_0)            \
    X(q5_1, Q5_1)            \
    X(iq4_nl, IQ4_NL)

#define LKV_ROW_FORMATS(X) LKV_STORED_FORMATS(X) LKV_STOCK_FORMATS(X)

namespace lkv {

#define X(name, type) name,
enum class Format : int32_t {
    none,
    LKV_FORMATS_1_TO_8(X) last_retired = 15,
    LKV_FORMATS_FROM_16(X) LKV_BLOCK_FORMATS(X) LKV_STOCK_FORMATS(X)
};
#undef X

// In the file's order, without `none`.
#define X(name, type) Format::name,
constexpr Format all_formats[] = {LKV_STORED_FORMATS(X) LKV_BLOCK_FORMATS(X) LKV_STOCK_FORMATS(X)};
#undef X

// Whether a number that was read stands for a format of this version.
inline bool format_exists(Format format) {
    return format == Format::none ||
           std::find(std::begin(all_formats), std::end(all_formats), format) != std::end(all_formats);
}

inline const char* format_name(Format format) {
    switch (format) {
        case Format::none:
            return "none";
#define X(name, type)  \
    case Format::name: \
        return #name;
            LKV_ROW_FORMATS(X)
            LKV_BLOCK_FORMATS(X)
#undef X
        case Format::last_retired:
            break;
    }
    return "?";
}

inline std::optional<Format> parse_format(std::string_view name) {
    if (name == format_name(Format::none)) return Format::none;
    for (const Format format : all_formats) {
        if (name == format_name(format)) return format;
    }
    return std::nullopt;
}

// Whether tokens are stored in blocks of 32 slots: K of the middle region only.
LKV_HD constexpr bool format_in_blocks(Format format) {
    switch (format) {
#define X(name, type)  \
    case Format::name: \
        return true;
        LKV_BLOCK_FORMATS(X)
#undef X
        default:
            return false;
    }
}

// Calls f with a value of the format's type, one that stores single rows. `none` stores nothing and has no type.
template <class F>
decltype(auto) with_format(Format format, F&& f) {
    switch (format) {
#define X(name, type)  \
    case Format::name: \
        return f(type{});
        LKV_ROW_FORMATS(X)
#undef X
        default:
            break;
    }
    throw std::invalid_argument(std::string("[format] expected a format of single rows; got ") + format_name(format));
}

// The same for a format of blocks.
template <class F>
decltype(auto) with_block_format(Format format, F&& f) {
    switch (format) {
#define X(name, type)  \
    case Format::name: \
        return f(type{});
        LKV_BLOCK_FORMATS(X)
#undef X
        default:
            break;
    }
    throw std::invalid_argument(std::string("[format] expected a format of blocks; got ") + format_name(format));
}

template <class F>
decltype(auto) with_any_format(Format format, F&& f) {
    return format_in_blocks(format) ? with_block_format(format, f) : with_format(format, f);
}

inline bool format_is_quantized(Format format) {
    return format != Format::none && with_any_format(format, [](auto f) { return decltype(f)::quantized; });
}

// Whether storing a row seeks the best step of every segment (formats/fit.h), which is most of the work then.
inline bool format_is_fitted(Format format) {
    return format != Format::none && with_any_format(format, [](auto f) {
               if constexpr (requires { decltype(f)::is_fitted; }) {
                   return bool{decltype(f)::is_fitted};
               } else {
                   return false;
               }
           });
}

// Widths must be a multiple of this.
inline int format_width_multiple(Format format) {
    return format == Format::none ? 1 : with_any_format(format, [](auto f) { return decltype(f)::width_multiple; });
}

// Bytes of a segment in one slot's row.
inline int format_bytes(Format format, int width) {
    return format == Format::none ? 0 : with_any_format(format, [=](auto f) { return decltype(f)::bytes(width); });
}

// The format of single rows that keeps a channel as finely: what sink and recent tokens take beside a format of blocks.
inline Format format_of_rows(Format format) {
    switch (format) {
        case Format::c8:
            return Format::q8;
        case Format::c4:
            return Format::q4;
        case Format::c3:
            return Format::q3;
        case Format::c2:
            return Format::q2;
        default:
            return format;
    }
}

#if !defined(__CUDACC__)

// Whole chunks of 16 go through vectors; only f16 can have a remainder.
template <class F>
void decode_segment(const uint8_t* src, int width, float* dst) {
    constexpr int chunks_per_block = F::block / chunk_width;
    Affine a = F::affine(src, 0);
    const int n_chunks = width / chunk_width;
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        if constexpr (chunks_per_block > 0) {
            if (chunk % chunks_per_block == 0) {
                a = F::affine(src, chunk / chunks_per_block);
            }
        }
        f32x16 v = F::codes(src, chunk);
        if constexpr (F::quantized) {
            v = {fma8(v.lo, splat(a.scale), splat(a.offset)), fma8(v.hi, splat(a.scale), splat(a.offset))};
        }
        store8(dst + chunk * chunk_width, v.lo);
        store8(dst + chunk * chunk_width + lanes, v.hi);
    }
    for (int i = n_chunks * chunk_width; i < width; i++) {
        dst[i] = F::code(src, i) * a.scale + a.offset;
    }
}

// A format of blocks. block: the segment in the row of the block's first slot, rows `stride` bytes apart; src: the segment in
// the slot's own row -> dst: [width]
inline void read_block_segment(Format format, const uint8_t* block, int64_t stride, const uint8_t* src, int width,
                               float* dst) {
    with_block_format(format, [=](auto f) {
        using F = decltype(f);
        for (int chunk = 0; chunk < width / chunk_width; chunk++) {
            float scale[chunk_width];
            float minimum[chunk_width];
            F::affine(block, stride, width, chunk * chunk_width, chunk_width, scale, minimum);
            const f32x16 code = F::codes(src, chunk);
            float* const out = dst + chunk * chunk_width;
            store8(out, fma8(code.lo, load8(scale), load8(minimum)));
            store8(out + lanes, fma8(code.hi, load8(scale + lanes), load8(minimum + lanes)));
        }
    });
}

// x: [width] -> dst: [format_bytes(format, width)]
inline void write_segment(Format format, const float* x, int width, uint8_t* dst) {
    with_format(format, [=](auto f) { decltype(f)::write(x, width, dst); });
}

// src: [format_bytes(format, width)] -> dst: [width]
inline void read_segment(Format format, const uint8_t* src, int width, float* dst) {
    with_format(format, [=](auto f) { decode_segment<decltype(f)>(src, width, dst); });
}

#endif

}  // namespace lkv
