// A test is an executable; a check that fails prints where and what, and the executable exits with 1.
#pragma once

#include <cmath>
#include <cstdio>
#include <string>

namespace lkv::test {

inline int n_checks = 0;
inline int n_failures = 0;

inline void check(bool holds, const char* file, int line, const std::string& what) {
    n_checks++;
    if (!holds) {
        n_failures++;
        std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
    }
}

// ‖got − want‖ / ‖want‖; infinite when anything is not finite.
template <class A, class B>
double relative_error(const A& got, const B& want) {
    double difference = 0.0;
    double norm = 0.0;
    for (size_t i = 0; i < want.size(); i++) {
        const double d = static_cast<double>(got[i]) - static_cast<double>(want[i]);
        difference += d * d;
        norm += static_cast<double>(want[i]) * static_cast<double>(want[i]);
    }
    if (!std::isfinite(difference)) return INFINITY;
    return norm > 0.0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

inline int report(const char* name) {
    std::printf("%s: %d checks, %d failures\n", name, n_checks, n_failures);
    return n_failures == 0 && n_checks > 0 ? 0 : 1;
}

}  // namespace lkv::test

#define CHECK(condition) lkv::test::check((condition), __FILE__, __LINE__, "not true: " #condition)
#define CHECK_MSG(condition, message) lkv::test::check((condition), __FILE__, __LINE__, (message))
#define CHECK_THROWS(statement, text)                                                                       \
    do {                                                                                                    \
        std::string said = "nothing was thrown";                                                            \
        try {                                                                                               \
            statement;                                                                                      \
        } catch (const std::exception& e) {                                                                 \
            said = e.what();                                                                                \
        }                                                                                                   \
        lkv::test::check(said.find(text) != std::string::npos, __FILE__, __LINE__,                          \
                         "expected an exception with \"" + std::string(text) + "\"; got \"" + said + "\""); \
    } while (false)
