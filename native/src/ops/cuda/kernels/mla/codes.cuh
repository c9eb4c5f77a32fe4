// Units of rows whose groups have scales (cache/formats/normal.h) -> operands of mma: codes less the middle of their range, which f16 holds
// exactly. The scale is multiplied with what a run of units has added up (K) or with a slot's weights (V), not with every code.
//
// Codes are or-ed into the mantissa of 1024 at bit 1 or above: at bit 0 half a code would be less than the mantissa's last bit. A code of
// one bit is the sign of 1. Lanes and channels are as in units.cuh.
#pragma once

#include "ops/cuda/kernels/mla/units.cuh"

namespace lkv::cuda {

// Operands are codes divided by 2^down: steps of all formats are about 1 then, and products of scales and weights keep their bits.
template <int Bits>
constexpr int code_down = Bits == 8 ? 5 : (Bits == 6 ? 3 : (Bits == 4 ? 2 : (Bits == 3 ? 1 : 0)));

// What an operand of 1 is worth at a scale of 1.
template <int Bits>
constexpr float code_unit =
    Bits == 1 ? 0.5f * NormalFormat<Bits>::step : NormalFormat<Bits>::step * static_cast<float>(1 << code_down<Bits>);

// Pairs of codes at bit `at` of a word's halves, 1 or more.
template <int Bits>
struct Centered {
    int at;
    __half2 times, plus;

    __device__ explicit Centered(int at_bit)
        : at(at_bit),
          times(half2_of(0x3c003c00u - 0x04000400u * static_cast<uint32_t>(at_bit + code_down<Bits>))),
          plus(__float2half2_rn((static_cast<float>(1024 >> at_bit) + NormalFormat<Bits>::z) *
                                (-1.0f / static_cast<float>(1 << code_down<Bits>)))) {}

    // The bits of a plane whose lowest is bit `first` of the code.
    __device__ uint32_t mask(int n_bits, int first = 0) const {
        return ((1u << n_bits) - 1u) * 0x10001u << (at + first);
    }
    __device__ uint32_t value(uint32_t codes) const { return bits(__hfma2(half2_of(codes), times, plus)); }
};
constexpr uint32_t code_exponent = 0x64006400;  // of 1024

// Bits 15 and 31 as the signs of 1.
__device__ inline uint32_t signs(uint32_t x) { return masked_xor(x, 0x80008000u, 0xbc00bc00u); }

// Shifts of a number of bits that is the lane's own: left ones are products, as the units that shift also mask and permute, which is most of
// what decoding does. (forgotten: else the compiler makes shifts of them.)
struct LaneShift {
    uint32_t times;
    int left_of_8;

    __device__ explicit LaneShift(int by) : times(static_cast<uint32_t>(forgotten(1 << by))), left_of_8(8 - by) {}
    __device__ uint32_t left(uint32_t x) const { return x * times; }

    // A word's bytes two by two, (0, 2) and (1, 3), shifted left; the other bits are anything.
    __device__ uint32_t even_bytes(uint32_t word) const { return left(word); }
    __device__ uint32_t odd_bytes(uint32_t word) const { return word >> left_of_8; }
};

// Three bits: the chunk's two words of the unit's three, its own codes' lower bits. chunk: 0 or 1 of the unit
__device__ inline uint32_t low_plane_of_3(uint32_t a, uint32_t b, int chunk) {
    return __byte_perm(a, b, chunk != 0 ? 0x5432 : 0x3210);
}

// A lane's eight channels of a unit of K.
template <int Bits>
struct KeyCodes {
    using P = Planes<Bits>;
    static constexpr int n_words = Bits == 8 ? 2 : (Bits == 6 ? 3 : (Bits == 4 || Bits == 3 ? 2 : 1));
    int t;
    LaneShift away;  // from bit 0
    Centered<Bits> first, second;
    LaneShift high;  // of six bits: the upper ones behind the lower ones
    LaneShift ones;  // of three bits: likewise

    __device__ explicit KeyCodes(int lane)
        : t(lane % 4),
          away(by()),
          first(Bits == 8 ? 1 : 4 * (t % 2) + by()),
          second(Bits == 3 || Bits == 2 ? first.at + 2 : first.at),
          high(by() + 2),
          ones(first.at + 2) {}

    __device__ void load(const uint8_t* at, uint32_t (&words)[n_words]) const {
        if constexpr (Bits == 1) {
            words[0] = u32_at<true>(at);
        } else {
            const int place = Bits == 8 ? 8 * t : (t / 2) * (Bits == 3 ? 4 : P::chunk_bytes);
#pragma unroll
            for (int i = 0; i < n_words; i++) words[i] = u32_at<true>(at + place + 4 * i);
        }
    }
    // The pairs of channels that KeyReader names.
    __device__ void decode(const uint32_t (&words)[n_words], uint32_t (&pairs)[4]) const {
        if constexpr (Bits == 1) {
            // bit j of the lane's byte, and j + 2 sixteen bits further, to bits 15 and 31
            const uint32_t both = (words[0] >> (8 * t) & 0xffu) * 0x4001u;
#pragma unroll
            for (int i = 0; i < 4; i++) pairs[i] = signs(both << (15 - i / 2 * 4 - i % 2));
            return;
        }
        uint32_t low[2] = {words[0], words[n_words > 1 ? 1 : 0]};  // of pairs 0 and 1, 2 and 3
        if constexpr (Bits == 3) low[0] = low[1] = low_plane_of_3(words[0], words[1], t / 2);
        constexpr int low_bits = Bits == 6 ? 4 : (Bits == 3 ? 2 : Bits);
        [[maybe_unused]] uint32_t upper = 0;
        if constexpr (Bits == 3) {
            // bit j of the byte, and j + 2 sixteen bits further, so that pair 0's are behind its lower ones
            const uint32_t byte = __byte_perm(words[1], 0, static_cast<uint32_t>(0x4440 + t / 2 * 2 + t % 2));
            upper = byte * (0x4001u * ones.times);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Centered<Bits>& of = i < 2 ? first : second;
            const uint32_t x = i % 2 == 0 ? away.even_bytes(low[i / 2]) : away.odd_bytes(low[i / 2]);
            uint32_t code = masked_or(x, of.mask(low_bits), code_exponent);
            if constexpr (Bits == 6) {
                const uint32_t word = i < 2 ? words[2] << 2 : words[2];
                const uint32_t y = i % 2 == 0 ? high.even_bytes(word) : words[2] >> (high.left_of_8 - (i < 2 ? 2 : 0));
                code = masked_or(y, of.mask(2, 4), code);
            }
            if constexpr (Bits == 3) code = masked_or(upper >> i, of.mask(1, 2), code);
            pairs[i] = of.value(code);
        }
    }

private:
    __device__ int by() const { return Bits == 8 || t % 2 == 0 ? 1 : 0; }
};

// A lane's four channels of a unit of V, of two slots.
template <int Bits>
struct ValueCodes {
    using P = Planes<Bits>;
    static constexpr int n_words = Bits == 6 || Bits == 3 ? 2 : 1;
    int g;
    int k;           // quarter of the chunk
    LaneShift away;  // from bit 0
    Centered<Bits> codes;
    LaneShift high;  // of six bits: the upper ones behind the lower ones
    LaneShift ones;  // of three bits: likewise; of one bit: channel 3 to the sign

    __device__ explicit ValueCodes(int lane)
        : g(lane / 4),
          k(g % 4),
          away(by()),
          codes(place_in_byte() + by()),
          high(Bits == 6 ? codes.at + 4 - 2 * k : 0),
          ones(Bits == 3 ? codes.at + 2 - 4 * (k % 2) : 4 - 4 * (g % 2)) {}

    // Where the lane's words lie in a unit.
    __device__ int place() const {
        if constexpr (Bits == 8) return 4 * g;
        if constexpr (Bits == 6 || Bits == 4) return g / 4 * P::chunk_bytes + 4 * (k % 2);
        if constexpr (Bits == 3 || Bits == 2) return 4 * (g / 4);
        return 0;
    }
    __device__ void load(const uint8_t* at, uint32_t (&words)[n_words]) const {
        words[0] = u32_at<true>(at);
        if constexpr (Bits == 6) words[1] = u32_at<true>(at + P::pair_at - 4 * (k % 2));
        if constexpr (Bits == 3) words[1] = u32_at<true>(at + 4);
    }
    // channels[j]: channel 4g + j of slots (a, b)
    __device__ void decode(const uint32_t (&a)[n_words], const uint32_t (&b)[n_words], uint32_t (&channels)[4]) const {
        if constexpr (Bits == 1) {
            // the byte with the lane's four bits, of both slots, as upper bytes of halves
            const auto byte = static_cast<uint32_t>(g / 2);
            const uint32_t both = __byte_perm(a[0], b[0], byte << 4 | (4 + byte) << 12);
#pragma unroll
            for (int j = 0; j < 4; j++) channels[j] = signs(both * (ones.times << (3 - j)));
            return;
        }
        uint32_t word[2] = {a[0], b[0]};
        if constexpr (Bits == 3) {
            word[0] = low_plane_of_3(a[0], a[1], g / 4);
            word[1] = low_plane_of_3(b[0], b[1], g / 4);
        }
        [[maybe_unused]] uint32_t upper = 0;
        if constexpr (Bits == 3) {
            // the byte with the lane's four bits, of both slots, so that channel 0's are behind their lower ones
            const auto byte = static_cast<uint32_t>(g / 4 * 2 + k / 2);
            upper = ones.left(__byte_perm(a[1], b[1], byte | (4 + byte) << 8));
        }
        constexpr int low_bits = Bits == 6 ? 4 : (Bits == 3 ? 2 : Bits);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t halves = j < 2 ? 0x5410 : 0x7632;
            const uint32_t low = __byte_perm(word[0], word[1], halves);
            uint32_t code =
                masked_or(j % 2 == 0 ? away.even_bytes(low) : away.odd_bytes(low), codes.mask(low_bits), code_exponent);
            if constexpr (Bits == 6) {
                const uint32_t pair = __byte_perm(a[1], b[1], halves);
                code = masked_or(j % 2 == 0 ? high.even_bytes(pair) : high.odd_bytes(pair), codes.mask(2, 4), code);
            }
            if constexpr (Bits == 3) code = masked_or(upper >> j, codes.mask(1, 2), code);
            channels[j] = codes.value(code);
        }
    }

private:
    __device__ int by() const { return Bits == 8 || place_in_byte() == 0 ? 1 : 0; }
    __device__ int place_in_byte() const {
        if constexpr (Bits == 6 || Bits == 4) return 4 * (k / 2);
        if constexpr (Bits == 3 || Bits == 2) return 2 * k;
        return 0;
    }
};

// Calls f(bits) as a constant, of formats that are scaled by their group.
template <class Use>
__device__ __forceinline__ void with_scaled_bits(uint8_t kind, Use&& use) {
    switch (kind) {
        case static_cast<uint8_t>(Format::n8):
            return use(std::integral_constant<int, 8>{});
        case static_cast<uint8_t>(Format::n6):
            return use(std::integral_constant<int, 6>{});
        case static_cast<uint8_t>(Format::n4):
            return use(std::integral_constant<int, 4>{});
        case static_cast<uint8_t>(Format::n3):
            return use(std::integral_constant<int, 3>{});
        case static_cast<uint8_t>(Format::n2):
            return use(std::integral_constant<int, 2>{});
        default:
            return use(std::integral_constant<int, 1>{});
    }
}

// Which of the n_scaled_formats a format is.
template <int Bits>
constexpr int scaled_format = Bits == 8 ? 5 : (Bits == 6 ? 4 : Bits - 1);
constexpr float most_scale = 240.0f;  // a weight can be 2^stale_max

}  // namespace lkv::cuda
