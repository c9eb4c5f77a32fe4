// Codes of a transposed tile as a lane multiplies them: packs of two or four, spread evenly over a word of 32 bits, one slot a lane.
//
// A width of one plane (planes.h) gives a word's codes by shifting and masking. Of two planes, as 6 = 4 + 2, a chunk of 16 channels is
// put together: four packs of four channels that follow each other.
#pragma once

#include "base/wide.h"
#include "ops/cpu/codes/codes.h"
#include "ops/cpu/tile.h"

namespace lkv {

constexpr int word_bytes = 4;

// What packs come from: a word.
template <int Bits>
struct WordPacks {
    static constexpr int in_pack = query_bits(Bits) == 8 ? 4 : 2;
    static constexpr int apart = 32 / in_pack;  // bits between codes of a pack
    static constexpr int per_group = apart / Bits;
    static constexpr uint32_t ones = in_pack == 4 ? 0x01010101u : 0x00010001u;

    static constexpr int groups(int width) { return (width * Bits + 31) / 32; }

    // Channel of code j of a pack.
    static constexpr int channel(int pack, int j) {
        const int bit = Bits * (pack % per_group) + apart * j;
        return channel_of<Bits>(word_bytes * (pack / per_group) + bit / 8, bit % 8 / Bits);
    }

    u32xw word;
    LKV_INLINE WordPacks(const uint32_t* words, int group) : word(load_wide<u32xw>(words + group * tile_slots)) {}
    LKV_INLINE u32xw pack(int i) const { return (word >> Bits * i) & Planes<Bits>::levels * ones; }
};

// A chunk of two planes.
template <int Bits>
struct ChunkPacks {
    using P = Planes<Bits>;
    static constexpr int in_pack = 4;
    static constexpr int apart = 8;
    static constexpr int per_group = chunk_width / in_pack;

    static constexpr int groups(int width) { return width / chunk_width; }
    static constexpr int channel(int pack, int j) { return in_pack * pack + j; }

    u32xw low[P::nibble ? 2 : 1];
    u32xw high;
    LKV_INLINE ChunkPacks(const uint32_t* words, int group) {
        const int byte = group * P::chunk_bytes;
        low[0] = word_at(words, byte);
        if constexpr (P::nibble) low[1] = word_at(words, byte + word_bytes);
        high = P::single ? half_at(words, byte + P::single_at) : word_at(words, byte + P::pair_at);
    }
    LKV_INLINE u32xw pack(int i) const {
        constexpr uint32_t ones = 0x01010101u;
        u32xw codes;
        if constexpr (P::nibble) {
            codes = low[i % 2] >> 4 * (i / 2) & 15u * ones;
        } else {
            codes = low[0] >> 2 * i & 3u * ones;
        }
        if constexpr (P::single) {  // four bits, one to a byte
            return codes | ((high >> 4 * i & 15u) * 0x00204081u & ones) << P::single_shift;
        }
        return codes | (high >> 2 * i & 3u * ones) << P::pair_shift;
    }

private:
    static LKV_INLINE u32xw half_at(const uint32_t* words, int byte) {
        return load_wide<u32xw>(words + byte / word_bytes * tile_slots) >> 8 * (byte % word_bytes);
    }
    static LKV_INLINE u32xw word_at(const uint32_t* words, int byte) {
        if (byte % word_bytes == 0) return half_at(words, byte);
        return half_at(words, byte) | half_at(words, byte + word_bytes / 2) << 16;
    }
};

template <int Bits>
constexpr bool has_two_planes = Bits == 3 || Bits == 5 || Bits == 6;

template <int Bits>
using Packs = std::conditional_t<has_two_planes<Bits>, ChunkPacks<Bits>, WordPacks<Bits>>;

}  // namespace lkv
