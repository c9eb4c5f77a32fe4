// Messages to standard error by level. ggml and libllama log through here too.
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"

namespace lkv {

enum class LogLevel : int { error = 0, warning = 1, info = 2, debug = 3 };

void set_log_level(LogLevel level);  // default: warning
LogLevel log_level();
void write_log(LogLevel level, std::string_view line);  // puts `error: ` or `warning: ` before the line

template <typename... Parts>
void log(LogLevel level, const Parts&... parts) {
    if (level <= log_level()) {
        write_log(level, concat(parts...));
    }
}

// Sends the messages of ggml and libllama to this log, from now on. They speak one level quieter than they claim: their
// info is a dump of every metadata key, their warnings concern guesses about a vocabulary. Safe to call again.
void install_library_logging();

// While alive, error messages of ggml and libllama on this thread are kept from standard error, so that a failed call
// can be reported as one Error.
class LibraryErrorCapture {
public:
    LibraryErrorCapture();
    ~LibraryErrorCapture();
    LibraryErrorCapture(const LibraryErrorCapture&) = delete;
    LibraryErrorCapture& operator=(const LibraryErrorCapture&) = delete;

    // The first error message seen, without its newline; empty when there was none.
    const std::string& first() const { return first_; }
    void keep(std::string_view text);

private:
    std::string first_;
    LibraryErrorCapture* previous_;
};

// What a call of a library returns, for callers that report its failure themselves.
template <class Call>
auto quietly(const Call& call) {
    const LibraryErrorCapture capture;
    return call();
}

}  // namespace lkv
