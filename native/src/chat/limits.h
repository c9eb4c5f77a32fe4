// Bounds on what strangers write: templates of files, requests, answers of models. llama.cpp's parsers recurse into what is
// nested, its range() builds a list, and a macro may call itself.
#pragma once

#include <cstddef>
#include <string_view>

namespace lkv {

// Errors: Error `[chat template] …` for a template whose brackets nest deeper than 100 or blocks deeper than 200, or with more
// than 4000 tokens in one tag: the parser recurses that deep. std::exception of the lexer for what is no Jinja.
void check_template(std::string_view source);

// Length of the text before the first bracket (those of strings too) that nests deeper than 200.
size_t shallow_part(std::string_view text);

// Errors: Error `[where] …` for text of which shallow_part() is not all.
void check_nesting(std::string_view where, std::string_view text);

// While alive, a template that runs on this thread is stopped, by an exception, where it has taken 2 MiB more of the stack.
class StackGuard {
public:
    StackGuard();
    ~StackGuard();
    StackGuard(const StackGuard&) = delete;
    StackGuard& operator=(const StackGuard&) = delete;

private:
    const char* previous_;
};

}  // namespace lkv
