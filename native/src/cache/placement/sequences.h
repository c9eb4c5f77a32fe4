// Sequences as bits of a mask, and positions as ranges.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace lkv {

constexpr int max_sequences = 64;  // one bit each in a slot's mask
constexpr uint64_t all_sequences = ~uint64_t{0};

constexpr uint64_t bit(int seq) { return uint64_t{1} << seq; }

// Calls visit(int) with every sequence of a mask, the lowest first.
template <typename F>
void each_sequence(uint64_t mask, F&& visit) {
    for (; mask != 0; mask &= mask - 1) visit(std::countr_zero(mask));
}

constexpr int most_guesses = 16;  // of a sequence at once

// An entry is how many of a sequence's latest tokens are guesses, which may be taken back.
using Guesses = std::array<int32_t, max_sequences>;

// Positions from `first` up to, and without, `end`.
struct Positions {
    int32_t first = 0;
    int32_t end = INT32_MAX;

    // As llama.cpp's verbs give them: a negative bound is open.
    static constexpr Positions between(int32_t p0, int32_t p1) { return {p0 < 0 ? 0 : p0, p1 < 0 ? INT32_MAX : p1}; }
    constexpr bool have(int32_t pos) const { return pos >= first && pos < end; }
};

}  // namespace lkv
