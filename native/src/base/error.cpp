#include "base/error.h"

#include <algorithm>

namespace lkv {
namespace {

// Bytes of the UTF-8 character that `text` begins with; 0 where its first byte begins none (RFC 3629, section 4).
size_t utf8_length(std::string_view text) {
    const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char lead = byte(0);
    if (lead < 0x80) {
        return 1;
    }
    const size_t n = lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
    if (n == 0 || n > text.size()) {
        return 0;
    }
    // overlong forms, surrogates, and what lies beyond U+10FFFF differ in their second byte
    const unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (byte(1) < low || byte(1) > high) {
        return 0;
    }
    for (size_t i = 2; i < n; i++) {
        if (byte(i) < 0x80 || byte(i) > 0xbf) {
            return 0;
        }
    }
    return n;
}

// The same, and 1 for a byte that begins none.
size_t character_length(std::string_view text) { return std::max<size_t>(1, utf8_length(text)); }

constexpr size_t longest_quoted = 80;

}  // namespace

std::string printable(std::string_view text) {
    constexpr std::string_view hex = "0123456789abcdef";

    std::string out;
    while (!text.empty()) {
        const size_t n = utf8_length(text);
        const auto byte = static_cast<unsigned char>(text[0]);
        if (n == 0 || byte < 0x20 || byte == 0x7f) {
            out += "\\x";
            out += hex[byte >> 4];
            out += hex[byte & 15];
            text.remove_prefix(1);
        } else {
            out += text.substr(0, n);
            text.remove_prefix(n);
        }
    }
    return out;
}

std::string quoted(std::string_view text) {
    size_t end = 0;
    while (end < text.size()) {
        const size_t next = end + character_length(text.substr(end));
        if (next > longest_quoted) {
            break;
        }
        end = next;
    }
    std::string out = "'";
    out += printable(text.substr(0, end));
    out += end < text.size() ? "…'" : "'";
    return out;
}

std::string quoted_path(std::string_view path) {
    size_t begin = 0;
    while (path.size() - begin > longest_quoted) {
        begin += character_length(path.substr(begin));
    }
    return (begin > 0 ? "'…" : "'") + printable(path.substr(begin)) + "'";
}

}  // namespace lkv
