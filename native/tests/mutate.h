// Seeded mutations of files, for fuzz programs that run without libFuzzer: PROGRAM [iterations] [seed] [corpus folder].
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

namespace lkv::test {

using Rng = std::mt19937_64;

inline size_t below(Rng& rng, size_t n) { return n == 0 ? 0 : rng() % n; }

// Numbers at which length arithmetic breaks.
inline uint64_t edge(Rng& rng) {
    static constexpr uint64_t edges[] = {0,
                                         1,
                                         7,
                                         8,
                                         9,
                                         31,
                                         32,
                                         33,
                                         63,
                                         64,
                                         255,
                                         256,
                                         65535,
                                         65536,
                                         0x7fffffff,
                                         0x80000000,
                                         0xffffffff,
                                         0x7fffffffffffffff,
                                         0x8000000000000000,
                                         ~uint64_t{0}};
    return edges[below(rng, std::size(edges))] + below(rng, 3) - 1;
}

inline void mutate(std::vector<uint8_t>& bytes, Rng& rng) {
    const size_t at = below(rng, bytes.size());
    switch (below(rng, 6)) {
        case 0:  // one bit
            if (!bytes.empty()) bytes[at] ^= static_cast<uint8_t>(1u << below(rng, 8));
            break;
        case 1:  // a 32- or 64-bit number
            for (size_t i = 0, n = below(rng, 2) ? 4 : 8, v = edge(rng); i < n && at + i < bytes.size(); ++i) {
                bytes[at + i] = static_cast<uint8_t>(v >> (8 * i));
            }
            break;
        case 2:  // a shorter file
            bytes.resize(at);
            break;
        case 3: {  // a piece again, elsewhere
            const std::vector<uint8_t> piece(
                bytes.begin() + static_cast<ptrdiff_t>(at),
                bytes.begin() + static_cast<ptrdiff_t>(at + below(rng, std::min<size_t>(64, bytes.size() - at))));
            bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(below(rng, bytes.size())), piece.begin(), piece.end());
            break;
        }
        case 4:  // a hole
            bytes.erase(
                bytes.begin() + static_cast<ptrdiff_t>(at),
                bytes.begin() + static_cast<ptrdiff_t>(at + below(rng, std::min<size_t>(16, bytes.size() - at))));
            break;
        default:  // noise
            if (!bytes.empty()) bytes[at] = static_cast<uint8_t>(rng());
            break;
    }
}

// Mutates `files` and those of the corpus. accepts(bytes): whether a file was read; a crash is the finding.
// `fixed` bytes at the head stay: they choose what the rest is for. Exit status: 1 unless both answers were given.
template <typename F>
int fuzz(int argc, char** argv, const char* name, std::vector<std::vector<uint8_t>> files, size_t fixed, F&& accepts) {
    const uint64_t n = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    if (argc > 3) {
        for (const auto& entry : std::filesystem::directory_iterator(argv[3])) {
            std::ifstream in(entry.path(), std::ios::binary);
            files.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
        }
    }
    for (const auto& file : files) accepts(file);
    Rng rng(seed);
    uint64_t refused = 0;
    for (uint64_t i = 0; i < n; ++i) {
        const std::vector<uint8_t>& whole = files[below(rng, files.size())];
        const auto head = whole.begin() + static_cast<ptrdiff_t>(std::min(fixed, whole.size()));
        std::vector<uint8_t> body(head, whole.end());
        for (size_t m = 1 + below(rng, 4); m > 0; --m) mutate(body, rng);
        body.insert(body.begin(), whole.begin(), head);
        refused += !accepts(body);
    }
    std::printf("%s: %llu files, %llu refused, seed %llu\n", name, static_cast<unsigned long long>(n),
                static_cast<unsigned long long>(refused), static_cast<unsigned long long>(seed));
    return n < 1000 || (refused > n / 10 && refused < n) ? 0 : 1;  // both sides of the fence were visited
}

}  // namespace lkv::test
