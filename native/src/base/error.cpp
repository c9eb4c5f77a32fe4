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

// Whether a terminal obeys the character that `text` begins with: C0 and C1 controls, DEL, separators of lines, and what turns the
// direction of text (Unicode's Bidi_Control), so that it reads otherwise than it is.
bool is_control(std::string_view text) {
    const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
    if (byte(0) < 0x20 || byte(0) == 0x7f) {
        return true;
    }
    if (byte(0) == 0xc2) {
        return byte(1) < 0xa0;  // U+0080 … U+009F
    }
    if (byte(0) == 0xd8) {
        return byte(1) == 0x9c;  // U+061C
    }
    if (byte(0) != 0xe2) {
        return false;
    }
    const unsigned low = byte(2);
    return (byte(1) == 0x80 && ((low >= 0x8e && low <= 0x8f) || (low >= 0xa8 && low <= 0xae))) ||  // U+200E, U+2028 …
           (byte(1) == 0x81 && low >= 0xa6 && low <= 0xa9);                                        // U+2066 … U+2069
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
        if (n > 0 && !is_control(text)) {
            out += text.substr(0, n);
            text.remove_prefix(n);
            continue;
        }
        for (size_t i = 0; i < std::max<size_t>(1, n); i++) {
            const auto byte = static_cast<unsigned char>(text[i]);
            out += "\\x";
            out += hex[byte >> 4];
            out += hex[byte & 15];
        }
        text.remove_prefix(std::max<size_t>(1, n));
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
