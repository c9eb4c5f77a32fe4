// SHA-256 (FIPS 180-4) of bytes that come piece by piece.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace lkv {

class Sha256 {
public:
    void add(std::span<const uint8_t> bytes);

    // The digest in 64 hexadecimal digits. Nothing may be added afterwards.
    std::string hex();

private:
    void compress(const uint8_t* block);

    std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<uint8_t, 64> waiting_{};
    size_t n_waiting_ = 0;
    uint64_t n_bytes_ = 0;
};

}  // namespace lkv
