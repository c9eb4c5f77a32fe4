// K in blocks of 32 tokens (cache/formats/channel.h): a slot's codes as f16 integers, and what all slots of the block share, the scale and the
// minimum of each channel. A block's rows lie `pitch` bytes apart, wherever they are.
#pragma once

#include "ops/cuda/rows/dequant.cuh"
#include "ops/cuda/softmax/parts.cuh"

namespace lkv::cuda {

// Calls f(bits) as a constant, of a format in token blocks; false: it is none.
template <class Use>
__device__ __forceinline__ bool with_block_bits(int kind, Use&& use) {
    switch (static_cast<Format>(kind)) {
        case Format::c8:
            use(std::integral_constant<int, 8>{});
            return true;
        case Format::c4:
            use(std::integral_constant<int, 4>{});
            return true;
        case Format::c3:
            use(std::integral_constant<int, 3>{});
            return true;
        case Format::c2:
            use(std::integral_constant<int, 2>{});
            return true;
        default:
            return false;
    }
}

// Numbers first … first + 15 of those that slots hold `share` each of, in the order of pairs. at: where the first slot holds its own, whose
// alignment all slots have
__device__ inline void sixteen_numbers(const uint8_t* at, int pitch, int share, int first, uint32_t (&pairs)[8]) {
    const bool is_power = (share & (share - 1)) == 0;
    const int share_bits = __ffs(share) - 1;
    const auto number = [&](int k) {
        const int slot = is_power ? (first + k) >> share_bits : small_quotient(first + k, share);
        return at + slot * pitch + 2 * (first + k - slot * share);
    };
    const auto aligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at)) | static_cast<uint32_t>(pitch);
    uint32_t words[8];
    if (share % 8 == 0 && aligned % 16 == 0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 x = *reinterpret_cast<const uint4*>(number(8 * i));
            words[4 * i] = x.x;
            words[4 * i + 1] = x.y;
            words[4 * i + 2] = x.z;
            words[4 * i + 3] = x.w;
        }
    } else if (share % 4 == 0 && aligned % 8 == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint2 x = *reinterpret_cast<const uint2*>(number(4 * i));
            words[2 * i] = x.x;
            words[2 * i + 1] = x.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) words[i] = u16_at(number(2 * i)) | u16_at(number(2 * i + 1)) << 16;
    }
    f16_pairs(words, pairs);
}

// The same of numbers first … first + 15, a multiple of 16, where one segment has all `width` channels of a group: as many a slot as is known
// here. at: on 16 bytes, or where a slot has fewer on as many
template <int width>
__device__ inline void sixteen_numbers_of_group(const uint8_t* at, int pitch, int first, uint32_t (&pairs)[8]) {
    constexpr int share = width / chunk_width;
    static_assert(share == 4 || share == 8 || share == 16);
    constexpr int slots = chunk_width / share;
    uint32_t words[8];
#pragma unroll
    for (int i = 0; i < slots; i++) {
        const uint8_t* const from = at + (first / share + i) * pitch;
        if constexpr (share == 4) {
            const uint2 x = *reinterpret_cast<const uint2*>(from);
            words[2 * i] = x.x;
            words[2 * i + 1] = x.y;
        } else {
#pragma unroll
            for (int k = 0; k < share / 8; k++) {
                const uint4 x = *reinterpret_cast<const uint4*>(from + 16 * k);
                words[4 * (i + k)] = x.x;
                words[4 * (i + k) + 1] = x.y;
                words[4 * (i + k) + 2] = x.z;
                words[4 * (i + k) + 3] = x.w;
            }
        }
    }
    f16_pairs(words, pairs);
}

// Scales and minima of a chunk's channels.
struct BlockNumbers {
    uint32_t scale[8];
    uint32_t minimum[8];
};

// block: the row of the block's first slot. group_width: of a group that is one segment, else 0
template <int Bits, int group_width = 0>
__device__ inline void load_block_numbers(const uint8_t* block, int pitch, const Chunk& chunk, BlockNumbers& to) {
    static_assert(token_block_slots == 2 * chunk_width);
    if constexpr (group_width > 0) {
        const uint8_t* const at = block + chunk.codes + ChannelFormat<Bits>::numbers_at(group_width);
        sixteen_numbers_of_group<group_width>(at, pitch, chunk.odd, to.scale);
        sixteen_numbers_of_group<group_width>(at + chunk_width * pitch, pitch, chunk.odd, to.minimum);
        return;
    }
    const int width = chunk.affine;  // of the segment
    const int first = chunk.odd;     // channel of it
    const int share = width / chunk_width;
    const uint8_t* const at = block + chunk.codes + ChannelFormat<Bits>::numbers_at(width);
    sixteen_numbers(at, pitch, share, first, to.scale);
    sixteen_numbers(at + chunk_width * pitch, pitch, share, first,
                    to.minimum);  // the second half of the slots holds minima
}

// A chunk's codes in the row of a slot.
template <int Bits>
__device__ inline void load_block_codes(const uint8_t* row, const Chunk& chunk, __half2 (&codes)[8]) {
    PlaneReader<Bits>::integers(row + chunk.codes + chunk.odd / chunk_width * Planes<Bits>::chunk_bytes, codes);
}

// The chunk of slot s in rows that begin with a block of tokens, of such a format or of another.
__device__ inline void pairs_in_block(const uint8_t* rows, int s, int pitch, const Chunk& chunk, uint32_t (&out)[8]) {
    const bool in_block = with_block_bits(chunk.kind, [&](auto bits_of) {
        constexpr int Bits = decltype(bits_of)::value;
        BlockNumbers numbers;
        load_block_numbers<Bits>(rows + s / token_block_slots * token_block_slots * pitch, pitch, chunk, numbers);
        __half2 codes[8];
        load_block_codes<Bits>(rows + s * pitch, chunk, codes);
#pragma unroll
        for (int p = 0; p < 8; p++)
            out[p] = bits(__hfma2(codes[p], half2_of(numbers.scale[p]), half2_of(numbers.minimum[p])));
    });
    if (!in_block) pairs_of_chunk(rows + s * pitch, chunk, out);
}

}  // namespace lkv::cuda
