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
//
// A format whose segments are scaled by their group (normal.h) says so with scaled_by_group. Its affine() reads the group from its
// first byte, and instead it has
//
//   write(x, width, inverse, dst)   inverse: of the format's scale in the group
#pragma once

#include <cstdint>

#include "base/half.h"
#if !defined(__CUDACC__)
#include "base/simd.h"
#endif

namespace lkv {

// Whether a group of such segments begins with their scales.
template <class F>
constexpr bool is_scaled_by_group = requires { F::scaled_by_group; };

constexpr int chunk_width = 16;  // channels that are packed and unpacked together

struct Affine {
    float scale;
    float offset;
};

// On a device a warp writes one segment: lane l takes elements (chunks, blocks) l, l + 32, …
// Sums come together in the order of the host's two vectors, so that both write the same bytes: lane l takes elements l % 16,
// l % 16 + 16, …, and the two halves of a warp add up different things (fit.h).
#if defined(__CUDA_ARCH__)
constexpr int writers = 32;
constexpr int adders = 16;
__device__ inline int writer() { return static_cast<int>(threadIdx.x % writers); }
__device__ inline int adder() { return static_cast<int>(threadIdx.x % adders); }

// Combined over `n` neighbouring lanes: writers, adders or those of a block.
template <int n, class Combine>
__device__ inline float across(float x, Combine combine) {
    for (int o = n / 2; o > 0; o /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

// A block of 32 channels is written by eight lanes, four channels each, and a warp takes four blocks at once.
constexpr int block_lanes = 8;
__device__ inline int block_lane() { return static_cast<int>(threadIdx.x % block_lanes); }
__device__ inline int block_writer() { return writer() / block_lanes; }
constexpr int block_writers = writers / block_lanes;

// From the other half of the writers.
__device__ inline float from_other_half(float x) { return __shfl_xor_sync(0xffffffffu, x, adders); }
#else
constexpr int writers = 1;
constexpr int adders = 1;
LKV_HD constexpr int writer() { return 0; }
LKV_HD constexpr int adder() { return 0; }

template <int n, class Combine>
LKV_HD float across(float x, Combine) {
    return x;
}
#endif

LKV_HD constexpr int round_up_to_word(int bytes) { return (bytes + 3) / 4 * 4; }

}  // namespace lkv
