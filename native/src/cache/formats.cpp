#include "cache/formats.h"

#include <algorithm>
#include <iterator>

namespace lkv {
namespace {

// Calls f with a value of the type of any format; `none` has none.
template <class T, class F>
T of_type(Format format, T none, F&& f) {
    if (format == Format::none) return none;
    return format_in_token_blocks(format) ? with_token_block_format(format, f) : with_format(format, f);
}

// Whole chunks of 16 go through vectors; only formats without a scale can have a remainder.
template <class F>
void decode_segment(const uint8_t* src, const uint8_t* scales, int width, float* dst) {
    constexpr int chunks_per_block = F::block / chunk_width;
    Affine a = F::affine(scales, 0);
    const int n_chunks = width / chunk_width;
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        if constexpr (chunks_per_block > 0) {
            if (chunk % chunks_per_block == 0) a = F::affine(scales, chunk / chunks_per_block);
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

}  // namespace

const char* format_name(Format format) {
    switch (format) {
        case Format::none:
            return "none";
#define X(name, type)  \
    case Format::name: \
        return #name;
            LKV_ROW_FORMATS(X)
            LKV_TOKEN_BLOCK_FORMATS(X)
#undef X
        case Format::last_retired:
            break;
    }
    return "?";
}

std::optional<Format> parse_format(std::string_view name) {
    if (name == format_name(Format::none)) return Format::none;
    for (const Format format : all_formats) {
        if (name == format_name(format)) return format;
    }
    return std::nullopt;
}

bool format_exists(Format format) {
    return format == Format::none ||
           std::find(std::begin(all_formats), std::end(all_formats), format) != std::end(all_formats);
}

bool format_is_quantized(Format format) {
    return of_type(format, false, [](auto f) { return decltype(f)::quantized; });
}

bool format_is_fitted(Format format) {
    return of_type(format, false, [](auto f) {
        if constexpr (requires { decltype(f)::is_fitted; }) {
            return bool{decltype(f)::is_fitted};
        } else {
            return is_scaled_by_group<decltype(f)>;
        }
    });
}

int format_width_multiple(Format format) {
    return of_type(format, 1, [](auto f) { return decltype(f)::width_multiple; });
}

int format_bytes(Format format, int width) {
    return of_type(format, 0, [=](auto f) { return decltype(f)::bytes(width); });
}

Format format_of_rows(Format format) {
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

void read_segment(Format format, const uint8_t* src, const uint8_t* scales, int width, float* dst) {
    with_format(format, [=](auto f) { decode_segment<decltype(f)>(src, scales, width, dst); });
}

void read_token_block_segment(Format format, const uint8_t* block, int64_t stride, const uint8_t* src, int width,
                              float* dst) {
    with_token_block_format(format, [=](auto f) {
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

}  // namespace lkv
