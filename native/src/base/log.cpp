#include "base/log.h"

#include <atomic>
#include <cstdio>

#include "llama.h"

namespace lkv {
namespace {

std::atomic<LogLevel> current_level{LogLevel::warning};
thread_local LibraryErrorCapture* active_capture = nullptr;
thread_local LogLevel continued_level = LogLevel::debug;  // of the message a GGML_LOG_LEVEL_CONT continues

LogLevel quieter(ggml_log_level level) {
    switch (level) {
        case GGML_LOG_LEVEL_ERROR:
            return LogLevel::error;
        case GGML_LOG_LEVEL_WARN:
            return LogLevel::info;
        case GGML_LOG_LEVEL_CONT:
            return continued_level;
        default:
            return LogLevel::debug;
    }
}

// They quote what a file says.
std::string printable_lines(std::string_view text) {
    std::string out;
    for (size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1)) {
        out += printable(text.substr(0, end)) + "\n";
    }
    return out + printable(text);
}

void on_library_message(ggml_log_level level, const char* text, void*) {
    const LogLevel ours = quieter(level);
    continued_level = ours;
    if (ours == LogLevel::error && active_capture != nullptr) {
        active_capture->keep(text);
    } else if (ours <= log_level()) {
        std::fputs(printable_lines(text).c_str(), stderr);
    }
}

}  // namespace

void set_log_level(LogLevel level) { current_level = level; }

LogLevel log_level() { return current_level; }

void write_log(LogLevel level, std::string_view line) {
    static constexpr const char* prefixes[] = {"error: ", "warning: ", "", ""};
    std::fprintf(stderr, "%s%s\n", prefixes[static_cast<int>(level)], printable(line).c_str());
}

void install_library_logging() {
    llama_log_set(on_library_message, nullptr);  // sets ggml's as well
}

LibraryErrorCapture::LibraryErrorCapture() : previous_(active_capture) { active_capture = this; }

void LibraryErrorCapture::keep(std::string_view text) {
    if (first_.empty()) {
        first_ = text.substr(0, text.find_last_not_of("\n ") + 1);
    }
}

LibraryErrorCapture::~LibraryErrorCapture() { active_capture = previous_; }

}  // namespace lkv
