// The row formats. One line of the tables below and one header in formats/ add a format; the order is the file's
// (`enums.format` in the schema).
#pragma once

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
#include "cache/formats/normal.h"
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

// The same, after those: tokens are written in token blocks, of 32 that share numbers (formats/channel.h)
#define LKV_TOKEN_BLOCK_FORMATS(X) \
    X(c8, ChannelFormat<8>)        \
    X(c4, ChannelFormat<4>)        \
    X(c3, ChannelFormat<3>)        \
    X(c2, ChannelFormat<2>)

// The other cache types of llama.cpp, of single rows again. They are there to be compared with: on a GPU one reader, channel by
// channel, serves them all (ops/cuda/rows/dequant.cuh).
#define LKV_STOCK_FORMATS(X) \
    X(bf16, BF16)            \
    X(q4_1, Q4_1)            \
    X(q5_0, Q5_0)            \
    X(q5_1, Q5_1)            \
    X(iq4_nl, IQ4_NL)

// Formats of groups that begin with their scales (formats/normal.h). A row has these throughout, or none of them.
#define LKV_NORMAL_FORMATS(X) \
    X(n8, NormalFormat<8>)    \
    X(n6, NormalFormat<6>)    \
    X(n5, NormalFormat<5>)    \
    X(n4, NormalFormat<4>)    \
    X(n3, NormalFormat<3>)    \
    X(n2, NormalFormat<2>)    \
    X(n1, NormalFormat<1>)

// Whose segments stand alone.
#define LKV_SEGMENT_FORMATS(X) LKV_STORED_FORMATS(X) LKV_STOCK_FORMATS(X)

#define LKV_ROW_FORMATS(X) LKV_SEGMENT_FORMATS(X) LKV_NORMAL_FORMATS(X)

namespace lkv {

#define X(name, type) name,
enum class Format : int32_t {
    none,
    LKV_FORMATS_1_TO_8(X) last_retired = 15,
    LKV_FORMATS_FROM_16(X) LKV_TOKEN_BLOCK_FORMATS(X) LKV_STOCK_FORMATS(X) LKV_NORMAL_FORMATS(X)
};
#undef X

// In the file's order, without `none`.
#define X(name, type) Format::name,
constexpr Format all_formats[] = {LKV_STORED_FORMATS(X) LKV_TOKEN_BLOCK_FORMATS(X) LKV_STOCK_FORMATS(X)
                                      LKV_NORMAL_FORMATS(X)};
#undef X

// Whether tokens are stored in token blocks, of 32 slots: K of the middle region only.
LKV_HD constexpr bool format_in_token_blocks(Format format) {
    switch (format) {
#define X(name, type)  \
    case Format::name: \
        return true;
        LKV_TOKEN_BLOCK_FORMATS(X)
#undef X
        default:
            return false;
    }
}

// Whether a group of such segments begins with their scales.
LKV_HD constexpr bool format_scaled_by_group(Format format) {
    switch (format) {
#define X(name, type)  \
    case Format::name: \
        return true;
        LKV_NORMAL_FORMATS(X)
#undef X
        default:
            return false;
    }
}

const char* format_name(Format format);
std::optional<Format> parse_format(std::string_view name);
// Whether a number that was read stands for a format of this version.
bool format_exists(Format format);
bool format_is_quantized(Format format);
// Whether storing a row seeks the best step of every segment (formats/fit.h), which is most of the work then.
bool format_is_fitted(Format format);
// Widths must be a multiple of this.
int format_width_multiple(Format format);
// Bytes of a segment in one slot's row.
int format_bytes(Format format, int width);
// The format of single rows that keeps a channel as finely: what sink and recent tokens take beside a format of token blocks.
Format format_of_rows(Format format);

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

// The same for a format of token blocks.
template <class F>
decltype(auto) with_token_block_format(Format format, F&& f) {
    switch (format) {
#define X(name, type)  \
    case Format::name: \
        return f(type{});
        LKV_TOKEN_BLOCK_FORMATS(X)
#undef X
        default:
            break;
    }
    throw std::invalid_argument(std::string("[format] expected a format of blocks; got ") + format_name(format));
}

#if !defined(__CUDACC__)

// x: [width] -> dst: [format_bytes(format, width)]. Not of formats that are scaled by their group.
inline void write_segment(Format format, const float* x, int width, uint8_t* dst) {
    with_format(format, [=](auto f) {
        if constexpr (is_scaled_by_group<decltype(f)>) {
            throw std::invalid_argument(std::string("[format] expected a format with scales of its own; got ") +
                                        format_name(format));
        } else {
            decltype(f)::write(x, width, dst);
        }
    });
}

// src: [format_bytes(format, width)], scales: the byte that its scales begin at -> dst: [width]
void read_segment(Format format, const uint8_t* src, const uint8_t* scales, int width, float* dst);

// The same of a segment with scales of its own.
inline void read_segment(Format format, const uint8_t* src, int width, float* dst) {
    read_segment(format, src, src, width, dst);
}

// A format of token blocks. block: the segment in the row of the block's first slot, rows `stride` bytes apart; src: the segment in
// the slot's own row -> dst: [width]
void read_token_block_segment(Format format, const uint8_t* block, int64_t stride, const uint8_t* src, int width,
                              float* dst);

#endif

}  // namespace lkv
