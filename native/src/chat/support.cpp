// What llama.cpp's chat code takes from its common.cpp and log.cpp, on top of llama.h: declared there (common.h, log.h), defined
// here, so that neither those files nor what they pull in are built.
#include <cstdarg>
#include <cstdio>
#include <string>
#include <vector>

#include "base/log.h"
#include "common.h"
#include "llama.h"
#include "log.h"

std::string string_join(const std::vector<std::string>& values, const std::string& separator) {
    std::string out;
    for (const std::string& value : values) {
        out += (&value == values.data() ? "" : separator) + value;
    }
    return out;
}

std::vector<std::string> string_split(const std::string& text, const std::string& delimiter) {
    std::vector<std::string> out;
    size_t begin = 0;
    for (size_t end; (end = text.find(delimiter, begin)) != std::string::npos; begin = end + delimiter.size()) {
        out.push_back(text.substr(begin, end - begin));
    }
    out.push_back(text.substr(begin));
    return out;
}

std::string string_repeat(const std::string& text, size_t n) {
    std::string out;
    out.reserve(text.size() * n);
    for (size_t i = 0; i < n; i++) {
        out += text;
    }
    return out;
}

void string_replace_all(std::string& text, const std::string& search, const std::string& replacement) {
    if (search.empty()) return;
    for (size_t at = 0; (at = text.find(search, at)) != std::string::npos; at += replacement.size()) {
        text.replace(at, search.size(), replacement);
    }
}

std::vector<llama_token> common_tokenize(const llama_vocab* vocab, const std::string& text, bool add_special,
                                         bool parse_special) {
    const auto length = static_cast<int32_t>(text.size());
    std::vector<llama_token> out(text.size() + 2);  // a token has a byte at least; BOS and EOS
    const int32_t n = llama_tokenize(vocab, text.data(), length, out.data(), static_cast<int32_t>(out.size()),
                                     add_special, parse_special);
    out.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return out;
}

std::string common_token_to_piece(const llama_vocab* vocab, llama_token token, bool special) {
    std::string out(64, '\0');
    int32_t n = llama_token_to_piece(vocab, token, out.data(), static_cast<int32_t>(out.size()), 0, special);
    if (n < 0) {
        out.resize(static_cast<size_t>(-n));
        n = llama_token_to_piece(vocab, token, out.data(), static_cast<int32_t>(out.size()), 0, special);
    }
    out.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return out;
}

// Messages go where llama.cpp's others go.

int common_log_get_verbosity_thold() {
    return lkv::log_level() >= lkv::LogLevel::debug  ? LOG_LEVEL_DEBUG
           : lkv::log_level() == lkv::LogLevel::info ? LOG_LEVEL_WARN
                                                     : LOG_LEVEL_ERROR;
}

common_log* common_log_main() { return nullptr; }

void common_log_add(common_log*, ggml_log_level level, const char* format, ...) {
    std::va_list arguments;
    va_start(arguments, format);
    std::va_list again;
    va_copy(again, arguments);
    const int n = std::vsnprintf(nullptr, 0, format, arguments);
    va_end(arguments);
    std::string text(n > 0 ? static_cast<size_t>(n) : 0, '\0');
    std::vsnprintf(text.data(), text.size() + 1, format, again);
    va_end(again);
    ggml_log_callback callback = nullptr;
    void* data = nullptr;
    llama_log_get(&callback, &data);
    if (callback != nullptr) {
        callback(level, text.c_str(), data);
    }
}
