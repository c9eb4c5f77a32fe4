// One exception type for bad input or state; its text is one line, `[where] expected …; got …`.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace lkv {

class Error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// Text from a file or a caller as it may appear in a one-line message: control characters as \xNN, at most 80 bytes.
inline std::string quoted(std::string_view text) {
    constexpr size_t longest = 80;
    constexpr std::string_view hex = "0123456789abcdef";

    std::string out = "'";
    for (char c : text.substr(0, longest)) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte < 0x20 || byte == 0x7f) {
            out += "\\x";
            out += hex[byte >> 4];
            out += hex[byte & 15];
        } else {
            out += c;
        }
    }
    out += text.size() > longest ? "…'" : "'";
    return out;
}

// Concatenates the parts as `<<` does; one-byte integers print as numbers.
template <typename... Parts>
std::string concat(const Parts&... parts) {
    std::ostringstream out;
    const auto put = [&out](const auto& part) {
        using Part = std::decay_t<decltype(part)>;
        if constexpr (std::is_same_v<Part, uint8_t> || std::is_same_v<Part, int8_t>) {
            out << static_cast<int>(part);
        } else if constexpr (std::is_same_v<Part, bool>) {
            out << (part ? "true" : "false");
        } else {
            out << part;
        }
    };
    (put(parts), ...);
    return std::move(out).str();
}

// Throws Error with the text `[where] part part …`.
template <typename... Parts>
[[noreturn]] void fail(std::string_view where, const Parts&... parts) {
    throw Error(concat('[', where, "] ", parts...));
}

}  // namespace lkv
