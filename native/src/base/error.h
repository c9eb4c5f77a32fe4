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

// One line of valid UTF-8: characters that a terminal obeys, and bytes that are no UTF-8, as \xNN.
std::string printable(std::string_view text);

// Text from a file or a caller as it may appear in a message: printable, its first 80 bytes (or up to 3 fewer, so that no
// character is cut).
std::string quoted(std::string_view text);

// A path as it may appear in a message: its last 80 bytes, where the file's name is.
std::string quoted_path(std::string_view path);

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

// Throws Error with the text `[where] part part …`, printable: a part, or `where`, may hold what a file says.
template <typename... Parts>
[[noreturn]] void fail(std::string_view where, const Parts&... parts) {
    throw Error(printable(concat('[', where, "] ", parts...)));
}

}  // namespace lkv
