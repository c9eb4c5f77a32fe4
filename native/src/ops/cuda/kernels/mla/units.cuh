// Units of 32 channels of stored rows -> operands of mma, without a detour through shared memory.
//
// Codes become f16 integers where they stand in a word: or-ed into the mantissa of 1024 they are 1024 + code · 2^bit, and one fma
// makes the integer, exactly, at any bit; a second applies scale and minimum.
//
//   K, operand a of scores (slots x channels): lane 4g + t has slots g and g + 8, and of each channels 8t … 8t + 7 in the pairs
//      (0, 2), (1, 3), (4, 6), (5, 7): codes of a word 16 bits apart. The queries have the same pairs (`queries` in kernel.cuh).
//   V, operand a of sums (channels x slots): lane 4g + t has channels 4g … 4g + 3, and of each slots (2t, 2t + 1), (2t + 8, 2t + 9).
//
// Where codes lie: cache/formats/planes.h.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/problem.h"
#include "ops/cuda/rows/dequant.cuh"

namespace lkv::cuda {

// A unit of one region's group, one side: where it is, where its segment's units end, and where those of its kind.
struct alignas(8) MlaUnit {
    uint16_t codes;   // bytes from the group's first staged one
    uint16_t affine;  // the same, of scale and minimum, or of the group's scale that it has
    uint8_t kind;     // ChunkKind; kind_none: not stored
    uint8_t end;
    uint8_t kind_end;
    uint8_t unused;
};

// Units of one side: lane u finds out about unit u. By one warp. first: byte of the group among those that are staged
__device__ inline int note_units(const Chunk* chunks, int n_chunks, uint32_t first, MlaUnit* units) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Chunk chunk = 2 * lane < n_chunks ? chunks[2 * lane] : Chunk{};
    const int before = lane == 0 ? 0 : lane - 1;
    const uint32_t affine = __shfl_sync(0xffffffffu, uint32_t{chunk.affine}, before);
    const uint32_t kind = __shfl_sync(0xffffffffu, uint32_t{chunk.kind}, before);
    const auto end_of = [&](bool begins) {  // of what lanes begin: the next one that does
        const uint32_t all = __ballot_sync(0xffffffffu, begins);
        const uint32_t later = lane == 31 ? 0 : all >> (lane + 1);
        return static_cast<uint8_t>(later == 0 ? 32 : lane + __ffs(static_cast<int>(later)));
    };
    MlaUnit unit{};
    unit.codes = static_cast<uint16_t>(chunk.codes + first);
    unit.affine = static_cast<uint16_t>(chunk.affine + first);
    unit.kind = chunk.kind;
    unit.kind_end = end_of(lane == 0 || kind != chunk.kind);
    unit.end = end_of(lane == 0 || kind != chunk.kind || affine != chunk.affine);
    units[lane] = unit;
    return __popc(__ballot_sync(0xffffffffu, chunk.kind != kind_none));
}

// ggml's blocks, a unit each with a scale of its own: less than 0 in place of bits.
constexpr int bits_q8_0 = -8;
constexpr int bits_q4_0 = -4;
template <int Bits>
constexpr int unit_bytes = Bits == bits_q8_0   ? Q8_0::block_bytes
                           : Bits == bits_q4_0 ? Q4_0::block_bytes
                                               : 4 * Bits;

// Calls f(bits) as a constant, of codes. Whole: or of rows that are stored whole, f16 and ggml's blocks. Scaled: or of formats that are
// scaled by their group
template <bool Whole = false, bool Scaled = true, class Use>
__device__ __forceinline__ void with_bits(uint8_t kind, Use&& use) {
    if constexpr (Whole) {
        if (kind == kind_f16_wide) return use(std::integral_constant<int, 16>{});
        if (kind == static_cast<uint8_t>(Format::q8_0)) return use(std::integral_constant<int, bits_q8_0>{});
        if (kind == static_cast<uint8_t>(Format::q4_0)) return use(std::integral_constant<int, bits_q4_0>{});
    }
    if constexpr (Scaled) {
        if (kind == static_cast<uint8_t>(Format::n6)) return use(std::integral_constant<int, 6>{});
        if (kind == static_cast<uint8_t>(Format::n3)) return use(std::integral_constant<int, 3>{});
    }
    switch (kind) {
        case static_cast<uint8_t>(Format::q8):
        case static_cast<uint8_t>(Format::n8):
            return use(std::integral_constant<int, 8>{});
        case static_cast<uint8_t>(Format::q4):
        case static_cast<uint8_t>(Format::n4):
            return use(std::integral_constant<int, 4>{});
        case static_cast<uint8_t>(Format::q2):
        case static_cast<uint8_t>(Format::n2):
            return use(std::integral_constant<int, 2>{});
        default:
            return use(std::integral_constant<int, 1>{});
    }
}

// Scale and minimum of a unit's codes, from a row's first staged byte.
template <int Bits>
struct UnitAffine {
    int at;
    uint32_t scale;  // selects the byte that it is in; 0: the word is scale and minimum

    __device__ explicit UnitAffine(const MlaUnit& unit)
        : at(Bits < 0 ? unit.affine : unit.affine & ~3),
          scale(format_scaled_by_group(static_cast<Format>(unit.kind)) ? 0x4440u | (unit.affine & 3u) : 0) {}
    __device__ uint32_t of(const uint8_t* row) const {
        if constexpr (Bits < 0) {  // codes from 0 on, less what is zero
            const __half2 of_block = splat_half(static_cast<uint16_t>(u16_at(row + at)));
            return bits(__hmul2(of_block, __floats2half2_rn(1.0f, Bits == bits_q8_0 ? -128.0f : -8.0f)));
        } else {
            const uint32_t word = u32_at<true>(row + at);
            return scale == 0 ? word : affine_of_scale<Bits>(__byte_perm(word, 0, scale));
        }
    }
};

// Codes at this bit of a word's halves.
struct CodesAt {
    uint32_t mask;
    __half2 times, plus;

    __device__ CodesAt(int bits, int at)
        : mask(((1u << bits) - 1u) * 0x10001u << at),
          times(half2_of(0x3c003c00u - 0x04000400u * static_cast<uint32_t>(at))),   // 2^-at
          plus(half2_of(0xe400e400u - 0x04000400u * static_cast<uint32_t>(at))) {}  // -2^(10 - at)
    __device__ uint32_t value(uint32_t word, __half2 scale, __half2 minimum) const {
        const __half2 code = __hfma2(half2_of((word & mask) | 0x64006400u), times, plus);
        return bits(__hfma2(code, scale, minimum));
    }
};

// A lane's eight channels of a unit of K. at: the row's codes of this unit.
template <int Bits>
struct KeyReader {
    static constexpr int n_words = Bits == 16 ? 4 : (Bits >= 4 ? 2 : 1);
    int t;
    CodesAt first, second;  // of words 0 and 1

    __device__ explicit KeyReader(int lane)
        : t(lane % 4),
          first(Bits == 16 ? 8 : Bits, Bits == 4 || Bits == 2 ? 4 * (t % 2) : 0),
          second(Bits == 16 ? 8 : Bits, Bits == 4 ? 4 * (t % 2) : (Bits == 2 ? 4 * (t % 2) + 2 : 0)) {}

    __device__ void load(const uint8_t* at, uint32_t (&words)[n_words]) const {
        if constexpr (Bits == 16) {
            const uint4 x = *reinterpret_cast<const uint4*>(at + 16 * t);
            words[0] = x.x;
            words[1] = x.y;
            words[2] = x.z;
            words[3] = x.w;
        } else if constexpr (Bits == 8) {
            words[0] = u32_at<true>(at + 8 * t);
            words[1] = u32_at<true>(at + 8 * t + 4);
        } else if constexpr (Bits == 4) {
            words[0] = u32_at<true>(at + 8 * (t / 2));
            words[1] = u32_at<true>(at + 8 * (t / 2) + 4);
        } else if constexpr (Bits == 2) {
            words[0] = u32_at<true>(at + 4 * (t / 2));
        } else {
            words[0] = u32_at<true>(at);
        }
    }
    // affine: scale and minimum
    __device__ void decode(const uint32_t (&words)[n_words], uint32_t affine, uint32_t (&pairs)[4]) const {
        if constexpr (Bits == 16) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                pairs[i] = __byte_perm(words[i / 2 * 2], words[i / 2 * 2 + 1], i % 2 != 0 ? 0x7632 : 0x5410);
            }
            return;
        }
        const __half2 scale = half2_of(__byte_perm(affine, 0, 0x1010));
        const __half2 minimum = half2_of(__byte_perm(affine, 0, 0x3232));
        if constexpr (Bits == 1) {
            // bits 0 … 7 of the lane's byte, those from 2 on once more 14 bits further: bit j + 2 behind bit j
            const uint32_t byte = words[0] >> (8 * t) & 0xffu;
            const uint32_t both = byte * 0x4001u;
#pragma unroll
            for (int i = 0; i < 4; i++) pairs[i] = CodesAt(1, i / 2 * 4 + i % 2).value(both, scale, minimum);
        } else {
            const uint32_t low = words[0];
            const uint32_t high = words[n_words - 1];
            pairs[0] = first.value(low, scale, minimum);
            pairs[1] = first.value(low >> 8, scale, minimum);
            pairs[2] = second.value(high, scale, minimum);
            pairs[3] = second.value(high >> 8, scale, minimum);
        }
    }
};

// The same of 6 or 3 bits, which lie in two planes.
template <int Bits>
struct TwoPlaneKeys {
    using P = Planes<Bits>;
    static constexpr int n_words = P::nibble ? 3 : 2;
    int chunk;  // byte of the lane's chunk in the unit
    int h;      // half of it

    __device__ explicit TwoPlaneKeys(int lane) : chunk(lane % 4 / 2 * P::chunk_bytes), h(lane % 2) {}

    __device__ void load(const uint8_t* at, uint32_t (&words)[n_words]) const {
        if constexpr (P::nibble) {
#pragma unroll
            for (int i = 0; i < 3; i++) words[i] = u32_at<true>(at + chunk + 4 * i);
        } else {
            words[0] = u32_at<false>(at + chunk);
            words[1] = u16_at(at + chunk + P::single_at);
        }
    }
    __device__ void decode(const uint32_t (&words)[n_words], uint32_t affine, uint32_t (&pairs)[4]) const {
        const __half2 scale = half2_of(__byte_perm(affine, 0, 0x1010));
        const __half2 minimum = half2_of(__byte_perm(affine, 0, 0x3232));
        const uint32_t twos = words[P::nibble ? 2 : 0] >> (4 * h);
        const uint32_t ones = (words[1] >> (8 * h) & 0xffu) * 0x4001u;  // bit j + 2 behind bit j
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t code = twos >> (i / 2 * 2 + i % 2 * 8) & 0x00030003u;
            if constexpr (P::nibble) {
                code = code << 4 | (words[i / 2] >> (4 * h + i % 2 * 8) & 0x000f000fu);
            } else {
                code |= (ones >> (i / 2 * 4 + i % 2) & 0x00010001u) << 2;
            }
            pairs[i] = bits(__hfma2(small_ints(code), scale, minimum));
        }
    }
};
template <>
struct KeyReader<6> : TwoPlaneKeys<6> {
    using TwoPlaneKeys<6>::TwoPlaneKeys;
};
template <>
struct KeyReader<3> : TwoPlaneKeys<3> {
    using TwoPlaneKeys<3>::TwoPlaneKeys;
};

// The same of ggml's blocks, which begin on two bytes.
template <>
struct KeyReader<bits_q8_0> : KeyReader<8> {
    using KeyReader<8>::KeyReader;
    __device__ void load(const uint8_t* at, uint32_t (&words)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) words[i] = u32_at<false>(at + 8 * t + 4 * i) ^ 0x80808080u;
    }
};
template <>
struct KeyReader<bits_q4_0> : KeyReader<8> {
    __device__ explicit KeyReader(int lane) : KeyReader<8>(lane) { first = second = CodesAt(4, t / 2 * 4); }
    __device__ void load(const uint8_t* at, uint32_t (&words)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) words[i] = u32_at<false>(at + t % 2 * 8 + 4 * i);
    }
};

// A lane's four channels of a unit of V, of two slots.
template <int Bits>
struct ValueReader {
    static constexpr int n_words = Bits == 16 ? 2 : 1;
    int g;
    CodesAt codes;

    __device__ explicit ValueReader(int lane)
        : g(lane / 4),
          codes(Bits == 16 ? 8 : Bits,
                Bits == 4 ? g % 4 / 2 * 4 : (Bits == 2 ? g % 4 * 2 : (Bits == 1 ? g % 2 * 4 : 0))) {}

    // Where the lane's codes lie in a unit.
    __device__ int place() const {
        if constexpr (Bits == 16) return 8 * g;
        if constexpr (Bits == 8) return 4 * g;
        if constexpr (Bits == 4) return 8 * (g / 4) + 4 * (g % 2);
        if constexpr (Bits == 2) return 4 * (g / 4);
        return 0;
    }
    __device__ void load(const uint8_t* at, uint32_t (&words)[n_words]) const {
        if constexpr (Bits == 16) {
            const uint2 x = *reinterpret_cast<const uint2*>(at);
            words[0] = x.x;
            words[1] = x.y;
        } else {
            words[0] = u32_at<true>(at);
        }
    }
    // channels[j]: channel 4g + j of slots (a, b)
    __device__ void decode(const uint32_t (&a)[n_words], const uint32_t (&b)[n_words], uint32_t affine_a,
                           uint32_t affine_b, uint32_t (&channels)[4]) const {
        if constexpr (Bits == 16) {
#pragma unroll
            for (int j = 0; j < 4; j++) channels[j] = __byte_perm(a[j / 2], b[j / 2], j % 2 != 0 ? 0x7632 : 0x5410);
            return;
        }
        const __half2 scale = half2_of(__byte_perm(affine_a, affine_b, 0x5410));
        const __half2 minimum = half2_of(__byte_perm(affine_a, affine_b, 0x7632));
        if constexpr (Bits == 1) {
            // the byte with the lane's four bits, of both slots
            const uint32_t both = __byte_perm(a[0], b[0], static_cast<uint32_t>(g / 2 * 0x101 + 0x400));
            // one reader for four bits: bit j is shifted to where bit 0 is
#pragma unroll
            for (int j = 0; j < 4; j++) channels[j] = codes.value(both >> j, scale, minimum);
        } else {
            const uint32_t low = __byte_perm(a[0], b[0], 0x5410);
            const uint32_t high = __byte_perm(a[0], b[0], 0x7632);
            channels[0] = codes.value(low, scale, minimum);
            channels[1] = codes.value(low >> 8, scale, minimum);
            channels[2] = codes.value(high, scale, minimum);
            channels[3] = codes.value(high >> 8, scale, minimum);
        }
    }
};

template <>
struct ValueReader<bits_q8_0> : ValueReader<8> {
    using ValueReader<8>::ValueReader;
    __device__ void load(const uint8_t* at, uint32_t (&words)[1]) const { words[0] = u32_at<false>(at) ^ 0x80808080u; }
};
template <>
struct ValueReader<bits_q4_0> : ValueReader<8> {
    __device__ explicit ValueReader(int lane) : ValueReader<8>(lane) { codes = CodesAt(4, g / 4 * 4); }
    __device__ int place() const { return g % 4 * 4; }
    __device__ void load(const uint8_t* at, uint32_t (&words)[1]) const { words[0] = u32_at<false>(at); }
};

}  // namespace lkv::cuda
