// Checks for the GGUF tests: count failures, say where, go on.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

#include "base/error.h"

namespace lkv_test {

inline int n_checks = 0;
inline int n_failures = 0;

inline void check(bool ok, std::string_view what, std::string_view detail, const char* file, int line) {
    ++n_checks;
    if (!ok) {
        ++n_failures;
        std::fprintf(stderr, "%s:%d: failed: %.*s %.*s\n", file, line, static_cast<int>(what.size()), what.data(),
                     static_cast<int>(detail.size()), detail.data());
    }
}

// The text of the lkv::Error that `call` throws; empty when it throws none.
template <typename Call>
std::string error_of(const Call& call) {
    try {
        call();
    } catch (const lkv::Error& error) {
        return error.what();
    }
    return {};
}

inline int summary(const char* name) {
    std::printf("%s: %d checks, %d failed\n", name, n_checks, n_failures);
    return n_failures == 0 && n_checks > 0 ? 0 : 1;
}

}  // namespace lkv_test

#define CHECK(condition) lkv_test::check((condition), #condition, "", __FILE__, __LINE__)

// The call throws an Error of one line whose text contains `part`.
#define CHECK_REFUSED(part, ...)                                                                                       \
    do {                                                                                                               \
        const std::string text = lkv_test::error_of([&] { __VA_ARGS__; });                                             \
        const bool said = text.find(part) != std::string::npos && text.find('\n') == std::string::npos;                \
        lkv_test::check(said, #__VA_ARGS__, "\n    wanted an error with: " + std::string(part) + "\n    got: " + text, \
                        __FILE__, __LINE__);                                                                           \
    } while (false)
