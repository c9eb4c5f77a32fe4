// Codes as operands of mma where they stand in a word, masked and no more: a code at bit b of a half is the f16 number code · 2^(b - 24), a
// subnormal one, which tensor cores multiply exactly. Queries make up for b (K), or the sums do at the end (V). The middle of a format's
// codes, which level = step · (code - z) takes off, is taken off sums: z times the sum of the queries or of the weights.
//
// So one instruction decodes two codes, where CodesAt and Centered take two and three. Rows must be alike in all regions. Lanes and
// channels are as in units.cuh.
#pragma once

#include "ops/cuda/kernels/mla/codes.cuh"

namespace lkv::cuda {

// 2^n, of -126 < n < 128
__device__ constexpr float two_to(int n) {
    return n < 0 ? 1.0f / static_cast<float>(1ull << -n) : static_cast<float>(1ull << n);
}
__device__ inline float power(int n) { return __int_as_float((127 + n) << 23); }

constexpr int subnormal_bits = 24;  // what a code at bit 0 is divided by

// Queries of a pair are multiplied by 2^(bare_middle - bit), its bit in the word, so that none is far from what it was.
template <int Bits>
constexpr int bare_middle = Bits == 8 ? 0 : (Bits == 6 || Bits == 4 ? 2 : 3);

// What the queries of a lane's pairs of a unit are multiplied by.
struct BareQueries {
    __half2 times[4];

    __device__ BareQueries(uint8_t kind, int t) {
        const auto format = static_cast<Format>(kind);
        const bool nibbles = format == Format::n6 || format == Format::n4;
        const bool twos = format == Format::n3 || format == Format::n2;
        const bool ones = format == Format::n1;
        const int first =
            (nibbles ? bare_middle<4> : (twos || ones ? bare_middle<2> : 0)) - (nibbles || twos ? 4 * (t % 2) : 0);
        const int behind = twos ? 2 : (ones ? 4 : 0);  // bits from pairs 0 and 1 to 2 and 3
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int by = first - i / 2 * behind - (ones ? i % 2 : 0);
            times[i] = half2_of(0x3c003c00u + static_cast<uint32_t>(by) * 0x04000400u);
        }
    }
};

template <int Bits>
__device__ inline uint32_t mask_at(int at, int n_bits = Bits) {
    return ((1u << n_bits) - 1u) * 0x10001u << at;
}

// A lane's eight channels of a unit of K.
template <int Bits>
struct BareKeys {
    using P = Planes<Bits>;
    static constexpr int n_words = Bits == 8 ? 2 : (Bits == 6 ? 3 : (Bits == 4 || Bits == 3 ? 2 : 1));
    int t, h;
    uint32_t low;      // mask of the widest plane's bits of pairs 0 and 1
    LaneShift behind;  // of three bits: the upper one behind the lower ones

    __device__ explicit BareKeys(int lane)
        : t(lane % 4),
          h(t % 2),
          low(mask_at<Bits>(Bits == 8 || Bits == 1 ? 0 : 4 * h, Bits == 6 ? 4 : (Bits == 3 ? 2 : Bits))),
          behind(Bits == 3 ? 4 * h + 2 : 0) {}

    __device__ void load(const uint8_t* at, uint32_t (&words)[n_words]) const {
        if constexpr (Bits == 1) {
            words[0] = u32_at<true>(at);
        } else {
            const int place = Bits == 8 ? 8 * t : (t / 2) * (Bits == 3 ? 4 : P::chunk_bytes);
#pragma unroll
            for (int i = 0; i < n_words; i++) words[i] = u32_at<true>(at + place + 4 * i);
        }
    }
    __device__ void decode(const uint32_t (&words)[n_words], uint32_t (&pairs)[4]) const {
        if constexpr (Bits == 1) {
            // bit j of the lane's byte, and j + 2 sixteen bits further
            const uint32_t both = (words[0] >> (8 * t) & 0xffu) * 0x4001u;
#pragma unroll
            for (int i = 0; i < 4; i++) pairs[i] = both & 0x10001u << (4 * (i / 2) + i % 2);
            return;
        }
        uint32_t of[2] = {words[0], words[n_words > 1 ? 1 : 0]};  // of pairs 0 and 1, 2 and 3
        if constexpr (Bits == 3) of[0] = of[1] = low_plane_of_3(words[0], words[1], t / 2);
        [[maybe_unused]] uint32_t upper = 0;
        if constexpr (Bits == 3) {
            const uint32_t byte = __byte_perm(words[1], 0, static_cast<uint32_t>(0x4440 + t / 2 * 2 + h));
            upper = byte * (0x4001u * behind.times);
        }
        constexpr bool shared_word = Bits == 3 || Bits == 2;  // of all pairs
        const uint32_t odd[2] = {of[0] >> 8, shared_word ? of[0] >> 8 : of[1] >> 8};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            pairs[i] = (i % 2 == 0 ? of[i / 2] : odd[i / 2]) & (shared_word && i >= 2 ? low << 2 : low);
            if constexpr (Bits == 6) {
                const uint32_t y = i % 2 == 0 ? words[2] << (4 - i / 2 * 2) : words[2] >> (4 + i / 2 * 2);
                pairs[i] = masked_or(y, mask_at<6>(4 * h + 4, 2), pairs[i]);
            }
            if constexpr (Bits == 3) pairs[i] = masked_or(upper >> i, mask_at<3>(4 * h + 2 * (i / 2) + 2, 1), pairs[i]);
        }
    }
};

// A lane's four channels of a unit of V, of two slots. Channel 4g + j has its codes at bit `at` of a half, of one bit at bit `at` + j.
template <int Bits>
struct BareValues : ValueCodes<Bits> {
    using Before = ValueCodes<Bits>;
    using Before::g, Before::k;
    static constexpr int n_words = Before::n_words;
    int at;
    uint32_t low;
    LaneShift behind;

    __device__ explicit BareValues(int lane)
        : Before(lane),
          at(bit(lane)),
          low(mask_at<Bits>(at, Bits == 6 ? 4 : (Bits == 3 ? 2 : Bits))),
          behind(Bits == 6 ? at + 4 - 2 * k : (Bits == 3 ? at + 2 - 4 * (k % 2) : 0)) {}

    __device__ static int bit(int lane) {
        const int k = lane / 4 % 4;
        if constexpr (Bits == 6 || Bits == 4) return 4 * (k / 2);
        if constexpr (Bits == 3 || Bits == 2) return 2 * k;
        return Bits == 1 ? 4 * (k % 2) : 0;
    }
    __device__ void decode(const uint32_t (&a)[n_words], const uint32_t (&b)[n_words], uint32_t (&channels)[4]) const {
        if constexpr (Bits == 1) {
            const auto byte = static_cast<uint32_t>(g / 2);
            const uint32_t both = __byte_perm(a[0], b[0], byte | (4 + byte) << 8);
#pragma unroll
            for (int j = 0; j < 4; j++) channels[j] = both & low << j;
            return;
        }
        uint32_t word[2] = {a[0], b[0]};
        [[maybe_unused]] uint32_t upper = 0;
        if constexpr (Bits == 3) {
            word[0] = low_plane_of_3(a[0], a[1], g / 4);
            word[1] = low_plane_of_3(b[0], b[1], g / 4);
            const auto byte = static_cast<uint32_t>(g / 4 * 2 + k / 2);
            upper = behind.left(__byte_perm(a[1], b[1], byte | (4 + byte) << 8));
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t halves = j < 2 ? 0x5410 : 0x7632;
            const uint32_t x = __byte_perm(word[0], word[1], halves);
            channels[j] = (j % 2 == 0 ? x : x >> 8) & low;
            if constexpr (Bits == 6) {
                const uint32_t pair = __byte_perm(a[1], b[1], halves);
                const uint32_t y = j % 2 == 0 ? behind.even_bytes(pair) : behind.odd_bytes(pair);
                channels[j] = masked_or(y, mask_at<6>(at + 4, 2), channels[j]);
            }
            if constexpr (Bits == 3) channels[j] = masked_or(upper >> j, mask_at<3>(at + 2, 1), channels[j]);
        }
    }
};

// What a lane's sums of a unit of V become at the end: times · sum - less · (sum of weights), of channel 4g + j twice as less times for
// each j where codes have one bit.
struct BareLevels {
    float times, less;
    bool one_bit;

    template <int Bits>
    __device__ static BareLevels of(int lane) {
        constexpr float down = Bits == 1 ? 2.0f : 1.0f / static_cast<float>(1 << code_down<Bits>);
        return {power(subnormal_bits - BareValues<Bits>::bit(lane)) * down, NormalFormat<Bits>::z * down, Bits == 1};
    }
    __device__ float value(float sum, float weights, int j) const {
        return fmaf(one_bit ? times * two_to(-j) : times, sum, -less * weights);
    }
};

}  // namespace lkv::cuda
