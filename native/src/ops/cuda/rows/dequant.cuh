// A chunk of 16 stored channels -> f16 pairs in registers. A pair is channels (j, j + 2): that order takes one mask out of
// a word of packed codes, and the contraction does not care as long as the queries use it too.
//
//   pair p = 0 … 7 of a chunk: channels j, j + 2 with j = {0, 1, 4, 5}[p % 4] + 8·(p / 4)
//   half h of a chunk (V): pairs 2h, 2h+1, 2h+4, 2h+5, that is channels 4h … 4h+3 and 8+4h … 8+4h+3
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "cache/formats.h"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/problem.h"
#include "ops/cuda/rows/rows.cuh"

namespace lkv::cuda {

__device__ inline uint32_t bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }
__device__ inline __half2 half2_of(uint32_t u) { return *reinterpret_cast<__half2*>(&u); }
__device__ inline __half2 splat_half(uint16_t u) { return __half2half2(__ushort_as_half(u)); }

__device__ inline uint32_t u16_at(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }

template <bool aligned>
__device__ inline uint32_t u32_at(const uint8_t* p) {
    if constexpr (aligned) return *reinterpret_cast<const uint32_t*>(p);
    return u16_at(p) | u16_at(p + 2) << 16;
}

// Small integers in 16-bit halves to f16, exactly.
__device__ inline __half2 small_ints(uint32_t u) {
    return __hsub2(half2_of(u | 0x64006400u), __half2half2(__ushort_as_half(0x6400)));
}

template <class F>
struct ChunkReader;

// Codes in bit planes with a scale and an offset.
template <int Bits>
struct PlaneReader {
    using P = Planes<Bits>;
    // Segments start on words; codes follow 4 bytes later, chunks are 2·Bits bytes.
    static constexpr bool aligned = (2 * Bits) % 4 == 0;

    __half2 scale;
    __half2 offset;

    __device__ PlaneReader(const uint8_t* row, const Chunk& chunk) : PlaneReader(u32_at<true>(row + chunk.affine)) {}
    // affine: scale and offset
    __device__ explicit PlaneReader(uint32_t affine)
        : scale(splat_half(static_cast<uint16_t>(affine))), offset(splat_half(static_cast<uint16_t>(affine >> 16))) {}

    __device__ uint32_t value(uint32_t codes) const { return bits(__hfma2(small_ints(codes), scale, offset)); }

    // Pair (q, hi) with q = 0 … 3: channels {0, 1, 4, 5}[q] + 8·hi and two more. `nibbles`, `bytes`: the word that holds it.
    __device__ static uint32_t pair(int q, int hi, uint32_t bytes, uint32_t nibbles, uint32_t pairs, uint32_t singles) {
        const int byte = 8 * (q & 1);
        if constexpr (P::byte) return bytes >> byte & 0x00ff00ffu;
        uint32_t code = 0;
        if constexpr (P::nibble) code |= nibbles >> (byte + 4 * hi) & 0x000f000fu;
        if constexpr (P::pair) code |= (pairs >> (byte + 2 * ((q >> 1) + 2 * hi)) & 0x00030003u) << P::pair_shift;
        if constexpr (P::single) {
            const int j = 4 * (q >> 1) + (q & 1) + 8 * hi;
            code |= ((singles >> j & 1u) | (singles << (14 - j) & 0x10000u)) << P::single_shift;
        }
        return code;
    }

    // The same as f16 integers, for codes of whole bytes and of nibbles alone: fewer instructions, no other numbers.
    static constexpr bool plain = Bits == 8 || Bits == 4;
    __device__ static __half2 plain_code(int q, int hi, uint32_t bytes, uint32_t nibbles) {
        if constexpr (Bits == 8) {
            return __hsub2(half2_of(__byte_perm(bytes, 0x64646464u, q & 1 ? 0x4341 : 0x4240)),
                           __float2half2_rn(1024.0f));
        } else {
            const uint32_t word = q & 1 ? nibbles >> 8 : nibbles;
            // 1024 + 16 · code, without a shift
            return hi != 0 ? __hfma2(half2_of((word & 0x00f000f0u) | 0x64006400u), __float2half2_rn(0.0625f),
                                     __float2half2_rn(-64.0f))
                           : small_ints(word & 0x000f000fu);
        }
    }
    __device__ uint32_t plain_value(int q, int hi, uint32_t bytes, uint32_t nibbles) const {
        return bits(__hfma2(plain_code(q, hi, bytes, nibbles), scale, offset));
    }

    // The codes of a chunk as f16 integers, in the order of pairs.
    __device__ static void integers(const uint8_t* codes, __half2 (&out)[8]) {
        if constexpr (plain) {
            uint32_t of_chunk[Bits / 2];
#pragma unroll
            for (int i = 0; i < Bits / 2; i++) of_chunk[i] = u32_at<aligned>(codes + 4 * i);
#pragma unroll
            for (int p = 0; p < 8; p++) {
                const int q = p & 3;
                const int hi = p >> 2;
                out[p] =
                    plain_code(q, hi, of_chunk[Bits == 8 ? (q >> 1) + 2 * hi : 0], of_chunk[Bits == 4 ? q >> 1 : 0]);
            }
            return;
        }
        uint32_t words[4] = {};
        uint32_t pairs = 0;
        uint32_t singles = 0;
        constexpr int n_words = P::byte ? 4 : (P::nibble ? 2 : 0);
#pragma unroll
        for (int i = 0; i < n_words; i++) words[i] = u32_at<aligned>(codes + 4 * i);
        if constexpr (P::pair) pairs = u32_at<aligned>(codes + P::pair_at);
        if constexpr (P::single) singles = u16_at(codes + P::single_at);
#pragma unroll
        for (int p = 0; p < 8; p++) {
            const int q = p & 3;
            const int hi = p >> 2;
            out[p] = small_ints(pair(q, hi, words[(q >> 1) + 2 * hi], words[q >> 1], pairs, singles));
        }
    }

    __device__ void all(const uint8_t* codes, uint32_t (&out)[8]) const {
        __half2 of_chunk[8];
        integers(codes, of_chunk);
#pragma unroll
        for (int p = 0; p < 8; p++) out[p] = bits(__hfma2(of_chunk[p], scale, offset));
    }

    __device__ void half(const uint8_t* codes, int h, uint32_t (&out)[4]) const {
        if constexpr (plain) {
            uint32_t of_half[Bits / 4];
#pragma unroll
            for (int i = 0; i < Bits / 4; i++) of_half[i] = u32_at<aligned>(codes + 4 * h + 8 * i);
#pragma unroll
            for (int p = 0; p < 4; p++)
                out[p] = plain_value(p & 1, p >> 1, of_half[Bits == 8 ? p >> 1 : 0], of_half[0]);
            return;
        }
        uint32_t words[2] = {};
        uint32_t pairs = 0;
        uint32_t singles = 0;
        if constexpr (P::byte || P::nibble) words[0] = u32_at<aligned>(codes + 4 * h);
        if constexpr (P::byte) words[1] = u32_at<aligned>(codes + 4 * h + 8);
        if constexpr (P::pair) pairs = u32_at<aligned>(codes + P::pair_at);
        if constexpr (P::single) singles = u16_at(codes + P::single_at);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            const int hi = p >> 1;
            out[p] = value(pair(2 * h + (p & 1), hi, words[hi], words[0], pairs, singles));
        }
    }
};

// Scale and minimum of a scale in a byte (formats/normal.h).
template <int Bits>
__device__ inline uint32_t affine_of_scale(uint32_t byte) {
    using F = NormalFormat<Bits>;
    return bits(__hmul2(half2_of(byte * 0x00800080u), __floats2half2_rn(F::step, F::bottom)));
}

// Rows of either kind, whose codes are alike: a path for each would be code to fetch.
template <int Bits>
struct ChunkReader<AffineFormat<Bits>> : PlaneReader<Bits> {
    __device__ ChunkReader(const uint8_t* row, const Chunk& chunk) : PlaneReader<Bits>(affine(row, chunk)) {}

    __device__ static uint32_t affine(const uint8_t* row, const Chunk& chunk) {
        if (!format_scaled_by_group(static_cast<Format>(chunk.kind))) return u32_at<true>(row + chunk.affine);
        return affine_of_scale<Bits>(row[chunk.affine]);
    }
};

// The kind whose codes are read alike.
__device__ constexpr int kind_of_codes(int kind) {
    constexpr int apart = static_cast<int>(Format::n8) - static_cast<int>(Format::q8);
    static_assert(static_cast<int>(Format::n1) - static_cast<int>(Format::q1) == apart);
    return format_scaled_by_group(static_cast<Format>(kind)) ? kind - apart : kind;
}

// ggml's blocks of one scale. Codes: of a word's bytes q % 2 and two further, as 1024 and more in f16, and which of these is zero.
template <class Codes>
struct BlockReader {
    __half2 scale;
    Codes codes_of;
    __device__ BlockReader(const uint8_t* row, const Chunk& chunk)
        : scale(splat_half(static_cast<uint16_t>(u16_at(row + chunk.affine)))), codes_of(chunk) {}

    __device__ uint32_t value(uint32_t word, int q) const {
        return bits(__hmul2(__hsub2(half2_of(codes_of(word, q)), __float2half2_rn(Codes::zero)), scale));
    }
    __device__ void all(const uint8_t* codes, uint32_t (&out)[8]) const {
        // whole words: four, or parts of five
        const bool parted = reinterpret_cast<uintptr_t>(codes) % 4 != 0;
        const auto* const at = reinterpret_cast<const uint32_t*>(codes - (parted ? 2 : 0));
        uint32_t word[5];
#pragma unroll
        for (int i = 0; i < 5; i++) word[i] = at[i < 4 || parted ? i : 3];
#pragma unroll
        for (int i = 0; i < 4; i++) word[i] = __byte_perm(word[i], word[i + 1], parted ? 0x5432 : 0x3210);
#pragma unroll
        for (int p = 0; p < 8; p++) out[p] = value(word[((p & 3) >> 1) + 2 * (p >> 2)], p);
    }
    // Pairs 2·w and 2·w + 1 of the chunk, which are in one word.
    __device__ uint2 pairs(const uint8_t* codes, int w) const {
        const bool parted = reinterpret_cast<uintptr_t>(codes) % 4 != 0;
        const auto* const at = reinterpret_cast<const uint32_t*>(codes - (parted ? 2 : 0)) + w;
        const uint32_t word = parted ? __byte_perm(at[0], at[1], 0x5432) : at[0];
        return make_uint2(value(word, 0), value(word, 1));
    }
    __device__ void half(const uint8_t* codes, int h, uint32_t (&out)[4]) const {
#pragma unroll
        for (int p = 0; p < 4; p++) out[p] = value(u32_at<false>(codes + 4 * h + 8 * (p >> 1)), p);
    }
};
template <class Reader>
constexpr bool reads_words = requires(const Reader& reader, const uint8_t* codes) { reader.pairs(codes, 0); };

// Two's complement to excess 128.
struct SignedBytes {
    static constexpr float zero = 1024.0f + 128.0f;
    __device__ explicit SignedBytes(const Chunk&) {}
    __device__ uint32_t operator()(uint32_t word, int q) const {
        return masked_xor(word >> (8 * (q & 1)), 0x00ff00ffu, 0x64806480u);
    }
};
struct Nibbles {
    static constexpr float zero = 1024.0f + 8.0f;
    int shift;
    __device__ explicit Nibbles(const Chunk& chunk) : shift(4 * chunk.odd) {}
    __device__ uint32_t operator()(uint32_t word, int q) const {
        return masked_xor(word >> (8 * (q & 1) + shift), 0x000f000fu, 0x64006400u);
    }
};
template <>
struct ChunkReader<Q8_0> : BlockReader<SignedBytes> {
    using BlockReader::BlockReader;
};
template <>
struct ChunkReader<Q4_0> : BlockReader<Nibbles> {
    using BlockReader::BlockReader;
};

// Channels (0, 1) and (2, 3) to pair (0, 2) or (1, 3).
__device__ inline uint32_t every_other(uint32_t a, uint32_t b, int odd) {
    return __byte_perm(a, b, odd ? 0x7632 : 0x5410);
}

// Words of two f16 channels -> pairs.
__device__ inline void f16_pairs(const uint32_t (&words)[8], uint32_t (&out)[8]) {
#pragma unroll
    for (int p = 0; p < 8; p++) {
        const int at = 2 * ((p & 3) >> 1) + 4 * (p >> 2);
        out[p] = every_other(words[at], words[at + 1], p & 1);
    }
}

template <>
struct ChunkReader<F16> {
    __device__ ChunkReader(const uint8_t*, const Chunk&) {}
    __device__ void all(const uint8_t* codes, uint32_t (&out)[8]) const {
        uint32_t words[8];
#pragma unroll
        for (int i = 0; i < 8; i++) words[i] = u32_at<true>(codes + 4 * i);
        f16_pairs(words, out);
    }
    __device__ void half(const uint8_t* codes, int h, uint32_t (&out)[4]) const {
#pragma unroll
        for (int hi = 0; hi < 2; hi++) {
            const uint32_t a = u32_at<true>(codes + 8 * h + 16 * hi);
            const uint32_t b = u32_at<true>(codes + 8 * h + 16 * hi + 4);
            out[2 * hi] = every_other(a, b, 0);
            out[2 * hi + 1] = every_other(a, b, 1);
        }
    }
};

// f16 on 16-byte boundaries.
struct WideF16Reader {
    __device__ WideF16Reader(const uint8_t*, const Chunk&) {}
    __device__ void all(const uint8_t* codes, uint32_t (&out)[8]) const {
        const uint4 a = *reinterpret_cast<const uint4*>(codes);
        const uint4 b = *reinterpret_cast<const uint4*>(codes + 16);
        const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        f16_pairs(words, out);
    }
    __device__ void half(const uint8_t* codes, int h, uint32_t (&out)[4]) const {
#pragma unroll
        for (int hi = 0; hi < 2; hi++) {
            const uint2 w = *reinterpret_cast<const uint2*>(codes + 8 * h + 16 * hi);
            out[2 * hi] = every_other(w.x, w.y, 0);
            out[2 * hi + 1] = every_other(w.x, w.y, 1);
        }
    }
};

// Channel by channel. Value: says what channel j of the chunk is.
template <class Value>
struct ChannelReader {
    int valid;
    Value value;
    __device__ ChannelReader(const uint8_t*, const Chunk& chunk) : valid(chunk.valid), value(chunk) {}
    __device__ __half at(const uint8_t* codes, int j) const {
        if (j >= valid) return __ushort_as_half(0);
        return __float2half_rn(fminf(fmaxf(value(codes, j), -half_max), half_max));
    }
    __device__ uint32_t pair(const uint8_t* codes, int j) const {
        return bits(__halves2half2(at(codes, j), at(codes, j + 2)));
    }
    __device__ void all(const uint8_t* codes, uint32_t (&out)[8]) const {
#pragma unroll
        for (int p = 0; p < 8; p++) out[p] = pair(codes, pair_channel(p));
    }
    __device__ void half(const uint8_t* codes, int h, uint32_t (&out)[4]) const {
#pragma unroll
        for (int p = 0; p < 4; p++) out[p] = pair(codes, 4 * h + (p & 1) + 8 * (p >> 1));
    }
};

// Chunks that end early, and f32 rows.
template <class F>
struct CodeValue {
    __device__ explicit CodeValue(const Chunk&) {}
    __device__ float operator()(const uint8_t* codes, int j) const { return F::code(codes, j); }
};
template <class F>
using SlowReader = ChannelReader<CodeValue<F>>;

template <>
struct ChunkReader<F32> : SlowReader<F32> {
    using SlowReader<F32>::SlowReader;
};

// Reads llama.cpp's other cache types. It is called: inline, five formats times 16 channels are minutes of compilation, and code that is slow
// to fetch beside the formats in use. block: of ggml's, the first byte; bf16: of the chunk
__device__ __noinline__ inline float stock_value(int kind, const uint8_t* block, int channel) {
    switch (static_cast<Format>(kind)) {
#define X(name, type)  \
    case Format::name: \
        return value_of<type>(block, block, channel);
        LKV_STOCK_FORMATS(X)
#undef X
        default:
            return 0.0f;
    }
}

struct StockValue {
    int kind;
    int first;  // channel of the block
    __device__ explicit StockValue(const Chunk& chunk) : kind(chunk.kind), first(chunk_width * chunk.odd) {}
    __device__ float operator()(const uint8_t* block, int j) const { return stock_value(kind, block, first + j); }
};
using StockReader = ChannelReader<StockValue>;

// Bits of a code of a kind from q8 to q1.
__device__ constexpr int affine_bits(int kind) {
    constexpr int first = static_cast<int>(Format::q8);
    static_assert(static_cast<int>(Format::q1) - first == 6);
    constexpr int bits_of[] = {8, 6, 5, 4, 3, 2, 1};
    return bits_of[kind - first];
}

// Calls f(reader) with the reader of this chunk; false where nothing is stored. Kind: what every chunk is, where that is known
// (one straight path of code instead of thirteen, which are slow to fetch), else any_kind.
template <int Kind = any_kind, class Use>
__device__ inline bool with_chunk(const uint8_t* row, const Chunk& chunk, Use&& use) {
    if constexpr (Kind == kind_f16_wide) {
        use(WideF16Reader(row, chunk));
        return true;
    } else if constexpr (Kind == static_cast<int>(Format::q8_0)) {
        use(ChunkReader<Q8_0>(row, chunk));
        return true;
    } else if constexpr (Kind == static_cast<int>(Format::q4_0)) {
        use(ChunkReader<Q4_0>(row, chunk));
        return true;
    } else if constexpr (Kind != any_kind) {
        use(PlaneReader<affine_bits(Kind)>(row, chunk));
        return true;
    }
    switch (kind_of_codes(chunk.kind)) {
        case kind_f16_wide:
            use(WideF16Reader(row, chunk));
            return true;
        case kind_f16_part:
            use(SlowReader<F16>(row, chunk));
            return true;
#define X(name, type)                        \
    case static_cast<uint8_t>(Format::name): \
        use(ChunkReader<type>(row, chunk));  \
        return true;
            LKV_STORED_FORMATS(X)
#undef X
#define X(name, type) case static_cast<uint8_t>(Format::name):
            LKV_STOCK_FORMATS(X)
#undef X
            use(StockReader(row, chunk));
            return true;
        default:
            return false;
    }
}

// Kinds that have code of their own where all chunks are of one.
#define LKV_OWN_KINDS(X)              \
    X(kind_f16_wide)                  \
    X(static_cast<int>(Format::q8))   \
    X(static_cast<int>(Format::q4))   \
    X(static_cast<int>(Format::q8_0)) \
    X(static_cast<int>(Format::q4_0))

// Launches by what all chunks are: launch(kind) gets it as a constant.
template <class Launch>
cudaError_t with_kind(int kind, Launch&& launch) {
    switch (kind) {
#define X(own) \
    case own:  \
        return launch(std::integral_constant<int, own>{});
        LKV_OWN_KINDS(X)
#undef X
        default:
            return launch(std::integral_constant<int, any_kind>{});
    }
}

// Calls f(kind) as a constant: Kind, or where that is any_kind what the chunks of this group are. Rows of several formats, exact
// windows beside quantized rows, take one short path a tile instead of a choice among all formats a chunk.
template <int Kind, class Use>
__device__ __forceinline__ void with_group_kind(int kind, Use&& use) {
    if constexpr (Kind != any_kind) {
        use(std::integral_constant<int, Kind>{});
    } else {
        switch (kind) {
#define X(own) \
    case own:  \
        return use(std::integral_constant<int, own>{});
            LKV_OWN_KINDS(X)
#undef X
            default:
                return use(std::integral_constant<int, any_kind>{});
        }
    }
}

#undef LKV_OWN_KINDS

__device__ inline void pairs_of_chunk(const uint8_t* row, const Chunk& chunk, uint32_t (&out)[8]) {
    if (!with_chunk(row, chunk, [&](const auto& reader) { reader.all(row + chunk.codes, out); })) {
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = 0;
    }
}

// One chunk of two slots.
template <int Kind = any_kind>
__device__ inline void two_slots(const uint8_t* a, const uint8_t* b, const Chunk& chunk, uint32_t (&x)[8],
                                 uint32_t (&y)[8]) {
    const bool stored = with_chunk<Kind>(a, chunk, [&](const auto& reader) {
        using Reader = std::remove_cvref_t<decltype(reader)>;
        reader.all(a + chunk.codes, x);
        Reader(b, chunk).all(b + chunk.codes, y);
    });
    if (!stored) {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = y[i] = 0;
    }
}

// The same half of two slots' chunk, as weights multiply it: out[2p + e] = channel e of pair p, slots (a, b).
__device__ inline void slot_pairs(const uint8_t* a, const uint8_t* b, const Chunk& chunk, int h, uint32_t (&out)[8]) {
    uint32_t x[4];
    uint32_t y[4];
    const bool stored = with_chunk(a, chunk, [&](const auto& reader) {
        using Reader = std::remove_cvref_t<decltype(reader)>;
        reader.half(a + chunk.codes, h, x);
        Reader(b, chunk).half(b + chunk.codes, h, y);
    });
#pragma unroll
    for (int p = 0; p < 4; p++) {
        out[2 * p] = stored ? __byte_perm(x[p], y[p], 0x5410) : 0;
        out[2 * p + 1] = stored ? __byte_perm(x[p], y[p], 0x7632) : 0;
    }
}

// What four_slots_at makes of codes of four bits: both slots' byte side by side before it becomes numbers takes two thirds of the steps.
template <class RowAt>
__device__ inline void four_slots_of_nibbles(const RowAt& row_at, const Chunk& chunk, int h, uint32_t (&first)[8],
                                             uint32_t (&second)[8]) {
    uint32_t affine[4];
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint8_t* const row = row_at(i);
        affine[i] = u32_at<true>(row + chunk.affine);
        codes[i] = u32_at<true>(row + chunk.codes + 4 * h);
    }
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const __half2 scale = half2_of(__byte_perm(affine[2 * s], affine[2 * s + 1], 0x5410));
        const __half2 offset = half2_of(__byte_perm(affine[2 * s], affine[2 * s + 1], 0x7632));
        uint32_t (&out)[8] = s == 0 ? first : second;
#pragma unroll
        for (int y = 0; y < 4; y++) {  // channels y and y + 8 of the half
            const uint32_t both = __byte_perm(codes[2 * s], codes[2 * s + 1], 0x4400 + 0x1111 * y);
            const __half2 high = __hfma2(half2_of((both & 0x00f000f0u) | 0x64006400u), __float2half2_rn(0.0625f),
                                         __float2half2_rn(-64.0f));
            const int at = 2 * (y % 2) + y / 2;
            out[at] = bits(__hfma2(small_ints(both & 0x000f000fu), scale, offset));
            out[at + 4] = bits(__hfma2(high, scale, offset));
        }
    }
}

// Which of a 64-channel block's channels row g of tile i is, i = 0 … 7: lane 4g + c has half g % 2 of chunk g / 2 from slot_pairs and
// four_slots.
__device__ inline int sum_channel(int g, int i) {
    return 16 * (g / 2) + 4 * (g % 2) + i / 2 % 2 + i / 4 * 8 + 2 * (i % 2);
}

// The same for slots (0, 1) and (2, 3) of four, whose rows are row_at(i).
template <int Kind = any_kind, class RowAt>
__device__ inline void four_slots_at(const RowAt& row_at, const Chunk& chunk, int h, uint32_t (&first)[8],
                                     uint32_t (&second)[8]) {
    if constexpr (Kind == static_cast<int>(Format::q4)) {
        return four_slots_of_nibbles(row_at, chunk, h, first, second);
    }
    uint32_t x[4][4];
    const bool stored = with_chunk<Kind>(row_at(0), chunk, [&](const auto& reader) {
        using Reader = std::remove_cvref_t<decltype(reader)>;
        reader.half(row_at(0) + chunk.codes, h, x[0]);
#pragma unroll
        for (int i = 1; i < 4; i++) {
            const uint8_t* const row = row_at(i);
            Reader(row, chunk).half(row + chunk.codes, h, x[i]);
        }
    });
#pragma unroll
    for (int p = 0; p < 4; p++) {
        first[2 * p] = stored ? __byte_perm(x[0][p], x[1][p], 0x5410) : 0;
        first[2 * p + 1] = stored ? __byte_perm(x[0][p], x[1][p], 0x7632) : 0;
        second[2 * p] = stored ? __byte_perm(x[2][p], x[3][p], 0x5410) : 0;
        second[2 * p + 1] = stored ? __byte_perm(x[2][p], x[3][p], 0x7632) : 0;
    }
}

// The same for slots (0, 1) and (second_pair, second_pair + 1) of rows `pitch` bytes apart.
template <int Kind = any_kind, int second_pair = 8>
__device__ inline void four_slots(const uint8_t* rows, int pitch, const Chunk& chunk, int h, uint32_t (&first)[8],
                                  uint32_t (&second)[8]) {
    four_slots_at<Kind>([&](int i) { return rows + (i % 2 + i / 2 * second_pair) * pitch; }, chunk, h, first, second);
}

}  // namespace lkv::cuda
