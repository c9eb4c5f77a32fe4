// Fuzzes the GGUF reader: any bytes are parsed and read to the last edge, or refused with lkv::Error.
// With clang: -fsanitize=fuzzer,address,undefined. Otherwise mutations of one file (mutate.h).
#include <cstdint>
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

#include "mutate.h"

int main(int argc, char** argv) {
    return lkv::test::fuzz(argc, argv, "fuzz_gguf", {lkv::test::sample_file().bytes()}, 0, parses);
}

#endif
