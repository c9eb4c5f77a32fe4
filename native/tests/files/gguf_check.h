// check.h and the refusals of lkv::Error: one line that says what was expected.
#pragma once

#include "base/error.h"
#include "check.h"

namespace lkv::test {

// The text of the Error that `call` throws; empty when it throws none.
template <typename Call>
std::string error_of(const Call& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.what();
    }
    return {};
}

}  // namespace lkv::test

#define CHECK_REFUSED(part, ...)                                                                              \
    do {                                                                                                      \
        const std::string text = lkv::test::error_of([&] { __VA_ARGS__; });                                   \
        const bool refused_so = text.find(part) != std::string::npos && text.find('\n') == std::string::npos; \
        CHECK_MSG(refused_so, "expected one line with \"" + std::string(part) + "\"; got \"" + text + "\"");  \
    } while (false)
