// Fuzzes the GGUF reader: any bytes are parsed and read to the last edge, or refused with lkv::Error.
// With clang: -fsanitize=fuzzer,address,undefined. Otherwise fuzz_gguf [iterations] [seed]: mutations of one file.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>

#include "base/error.h"
#include "gguf/reader.h"
#include "gguf_bytes.h"

namespace {

volatile uint64_t last_sum = 0;  // what was read counts as used

bool parses(std::span<const uint8_t> input) {
    const lkv::test::GuardedBytes bytes(input);
    try {
        last_sum = lkv::test::touch(lkv::GgufFile(bytes.all()));
        return true;
    } catch (const lkv::Error&) {
        return false;
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    parses({data, size});
    return 0;
}

#ifndef LKV_LIBFUZZER

#include <cstdio>
#include <cstdlib>
#include <random>

namespace {

using lkv::test::Bytes;
using Rng = std::mt19937_64;

size_t below(Rng& rng, size_t n) { return n == 0 ? 0 : rng() % n; }

// Numbers at which length arithmetic breaks.
uint64_t edge(Rng& rng) {
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

void mutate(Bytes& bytes, Rng& rng) {
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
            const Bytes piece(
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

}  // namespace

int main(int argc, char** argv) {
    const uint64_t n = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    const Bytes whole = lkv::test::sample_file().bytes();
    Rng rng(seed);
    uint64_t refused = 0;
    for (uint64_t i = 0; i < n; ++i) {
        Bytes bytes = whole;
        for (size_t m = 1 + below(rng, 4); m > 0; --m) mutate(bytes, rng);
        refused += !parses(bytes);
    }
    std::printf("fuzz_gguf: %llu files, %llu refused, seed %llu\n", static_cast<unsigned long long>(n),
                static_cast<unsigned long long>(refused), static_cast<unsigned long long>(seed));
    const bool mixed = n < 1000 || (refused > n / 10 && refused < n);  // both sides of the fence were visited
    return mixed ? 0 : 1;
}

#endif
