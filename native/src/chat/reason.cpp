#include "chat/reason.h"

#include <string_view>

namespace lkv {

std::string reason(const std::exception& error) {
    std::string_view text = error.what();
    constexpr std::string_view marks[] = {"\nError: ", "Jinja Exception: "};
    for (const std::string_view mark : marks) {
        if (const size_t at = text.rfind(mark); at != std::string_view::npos) {
            text.remove_prefix(at + mark.size());
        }
    }
    std::string out;
    for (const char c : text.substr(0, 300)) {
        const bool blank = c == ' ' || c == '\n' || c == '\t' || c == '\r';
        if (!blank) {
            out += c;
        } else if (!out.empty() && out.back() != ' ') {
            out += ' ';
        }
    }
    while (!out.empty() && out.back() == ' ') {
        out.pop_back();
    }
    return out;
}

}  // namespace lkv
