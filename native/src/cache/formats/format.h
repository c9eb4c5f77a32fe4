// What every row format provides. A format stores one segment: `width` channels of one token, `bytes(width)` bytes long.
//
//   width_multiple          legal widths
//   block                   channels that share one (scale, offset): 32, or 0 for the whole segment
//   quantized               false: codes are values and affine() is (1, 0)
//   bytes(width)            a multiple of 4, so that every segment of a row starts on a word
//   write(x, width, dst)    quantize; the codes are chosen for the scale as stored, after its rounding
//   affine(src, block)      scale and offset of a block
//   code(src, i)            code of channel i;   value = code · scale + offset
//   codes(src, chunk)       codes of 16 channels in two vectors (host)
#pragma once

#include <cstdint>

#include "base/half.h"
#if !defined(__CUDACC__)
#include "base/simd.h"
#endif

namespace lkv {

constexpr int chunk_width = 16;  // channels that are packed and unpacked together

struct Affine {
    float scale;
    float offset;
};

LKV_HD constexpr int round_up_to_word(int bytes) { return (bytes + 3) / 4 * 4; }

}  // namespace lkv
