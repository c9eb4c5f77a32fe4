// Fuzzes the GGUF reader: any bytes are parsed and read to the last edge, or refused with lkv::Error.
// With clang: -fsanitize=fuzzer,address,undefined. Otherwise mutations of one file (mutate.h).
#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"
#include "files/gguf_bytes.h"
#include "gguf/reader.h"

namespace {

volatile uint64_t last_sum = 0;  // what was read counts as used

// Why the bytes are refused; empty: they are not.
std::string refusal(std::span<const uint8_t> input) {
    const lkv::test::GuardedBytes bytes(input);
    try {
        last_sum = lkv::test::touch(lkv::GgufFile(bytes.all()));
        return {};
    } catch (const lkv::Error& error) {
        return error.what();
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    refusal({data, size});
    return 0;
}

#ifndef LKV_LIBFUZZER

#include "fuzz/mutate_gguf.h"

int main(int argc, char** argv) {
    return lkv::test::fuzz(argc, argv,
                           {.name = "fuzz_gguf",
                            .files = {lkv::test::sample_file().bytes()},
                            .read = refusal,
                            .mutate_parts = lkv::test::mutate_gguf,
                            .less = lkv::test::less_of_gguf});
}

#endif
