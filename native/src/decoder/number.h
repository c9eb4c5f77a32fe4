// Whole numbers of a file, within limits.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "gguf/reader.h"

namespace lkv {

// Errors: Error for a value that is not from `low` to `high`. key: where it was read.
inline int check_within(const std::string& key, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) fail(key, "expected a value from ", low, " to ", high, "; got ", value);
    return static_cast<int>(value);
}

// Errors: Error for a missing key, or a number that is not from `low` to `high`.
inline int number_within(const GgufFile& file, const std::string& key, int64_t low, int64_t high) {
    return check_within(key, file.get_u32(key), low, high);
}

}  // namespace lkv
