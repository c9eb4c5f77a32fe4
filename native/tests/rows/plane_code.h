// Codes in bit planes, read from the text of cache/formats/planes.h.
#pragma once

#include <cstdint>
#include <vector>

namespace lkv::test {

inline unsigned u16(const std::vector<uint8_t>& b, int at) {
    return b[static_cast<size_t>(at)] | static_cast<unsigned>(b[static_cast<size_t>(at) + 1]) << 8;
}

// Bits `shift … shift + n − 1` of a byte.
inline int bits(const std::vector<uint8_t>& b, int at, int shift, int n) {
    return b[static_cast<size_t>(at)] >> shift & ((1 << n) - 1);
}

// Code of channel i of a segment whose codes begin at `codes_at`.
inline int plane_code(const std::vector<uint8_t>& b, int codes_at, int n_bits, int i) {
    int at = codes_at + i / 16 * 2 * n_bits;
    const int j = i % 16;
    if (n_bits == 8) return b[static_cast<size_t>(at + j)];
    int code = 0;
    int shift = 0;
    if (n_bits & 4) {
        code = bits(b, at + j % 8, 4 * (j / 8), 4);
        at += 8;
        shift = 4;
    }
    if (n_bits & 2) {
        code |= bits(b, at + j % 4, 2 * (j / 4), 2) << shift;
        at += 4;
        shift += 2;
    }
    if (n_bits & 1) code |= bits(b, at + j / 8, j % 8, 1) << shift;
    return code;
}

}  // namespace lkv::test
