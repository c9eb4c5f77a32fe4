// A whole number that a file must have, within limits.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "gguf/reader.h"

namespace lkv {

inline int number_within(const GgufFile& file, const std::string& key, int64_t low, int64_t high) {
    const int64_t value = file.get_u32(key);
    if (value < low || value > high) fail(key, "expected a value from ", low, " to ", high, "; got ", value);
    return static_cast<int>(value);
}

}  // namespace lkv
