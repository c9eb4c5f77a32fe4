// A word of the schema's enumerations.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "base/error.h"
#include "gguf_schema.h"

namespace lkv {

// Errors: Error that lists the words, for another one. key: where the word was read.
template <typename Enum, size_t n>
Enum parse_word(std::string_view key, std::string_view word, const std::array<std::string_view, n>& words) {
    if (const auto found = schema::parse<Enum>(words, word)) return *found;
    std::string known;
    for (const std::string_view each : words) known += (known.empty() ? "" : ", ") + std::string(each);
    fail(key, "expected one of ", known, "; got ", quoted(word));
}

}  // namespace lkv
