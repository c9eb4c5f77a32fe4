#include "chat/limits.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "base/error.h"
#include "jinja/lexer.h"
#include "jinja/runtime.h"
#include "jinja/value.h"

namespace {

constexpr double longest_range = 100'000;  // as in Jinja's own sandbox
constexpr std::ptrdiff_t most_stack = 2 << 20;

thread_local const char* stack_base = nullptr;  // of the outermost StackGuard

void check_stack() {
    const char here = 0;
    if (stack_base != nullptr) {
        const std::ptrdiff_t grown = reinterpret_cast<intptr_t>(stack_base) - reinterpret_cast<intptr_t>(&here);
        if (std::max(grown, -grown) > most_stack) {
            throw jinja::raised_exception("a macro that calls itself without end");
        }
    }
}

void check_range(const jinja::func_args& args) {
    const auto number = [&args](size_t i) {
        const jinja::value v = args.get_pos(i);
        return jinja::is_val<jinja::value_int>(v) ? static_cast<double>(v->as_int()) : 0;
    };
    const size_t n = args.count();
    const double start = n > 1 ? number(0) : 0;
    const double stop = n > 1 ? number(1) : n > 0 ? number(0) : 0;
    const double step = n > 2 ? number(2) : 1;
    if (step != 0 && (stop - start) / step > longest_range) {
        throw jinja::raised_exception(lkv::concat("range() of more than ", longest_range, " numbers"));
    }
}

}  // namespace

namespace jinja {

const func_builtins& unlimited_builtins();  // value.cpp's global_builtins, renamed by the build

// Looked up for every name that a running template reads, the callee of a macro call among them.
const func_builtins& global_builtins() {
    static const func_builtins limited = [] {
        func_builtins out = unlimited_builtins();
        out["range"] = [unlimited = out.at("range")](const func_args& args) -> value {
            check_range(args);
            return unlimited(args);
        };
        return out;
    }();
    check_stack();
    return limited;
}

}  // namespace jinja

namespace lkv {
namespace {

constexpr int deepest_brackets = 100;
constexpr int deepest_blocks = 200;
constexpr size_t longest_tag = 4000;  // tokens
constexpr int deepest_text = 200;

// Depth of blocks; every `elif` is an `if` in the `else` of the one before.
class Blocks {
public:
    void tag(const std::string& keyword) {
        constexpr std::string_view openers[] = {"if", "for", "macro", "filter", "call"};
        if (keyword == "elif" && !open_.empty()) {
            open_.back()++;
            depth_++;
        } else if (std::find(std::begin(openers), std::end(openers), keyword) != std::end(openers)) {
            open_.push_back(1);
            depth_++;
        } else if (keyword.starts_with("end") && !open_.empty()) {
            depth_ -= open_.back();
            open_.pop_back();
        }
    }
    int depth() const { return depth_; }

private:
    std::vector<int> open_;
    int depth_ = 0;
};

int bracket(jinja::token::type type) {
    using jinja::token;
    switch (type) {
        case token::open_paren:
        case token::open_curly_bracket:
        case token::open_square_bracket:
            return 1;
        case token::close_paren:
        case token::close_curly_bracket:
        case token::close_square_bracket:
            return -1;
        default:
            return 0;
    }
}

}  // namespace

void check_template(std::string_view source) {
    using jinja::token;
    const auto lexed = jinja::lexer().tokenize(std::string(source));
    Blocks blocks;
    int brackets = 0;
    size_t in_tag = 0;
    bool keyword_next = false;
    for (const token& token : lexed.tokens) {
        if (token.t == token::open_statement || token.t == token::open_expression) {
            in_tag = 0;
            brackets = 0;
            keyword_next = token.t == token::open_statement;
            continue;
        }
        if (keyword_next) {
            blocks.tag(token.value);
            keyword_next = false;
        }
        brackets += bracket(token.t);
        if (brackets > deepest_brackets || blocks.depth() > deepest_blocks) {
            fail("chat template", "expected at most ", deepest_brackets, " nested brackets and ", deepest_blocks,
                 " nested blocks; got more");
        }
        if (++in_tag > longest_tag) {
            fail("chat template", "expected at most ", longest_tag, " tokens between {% and %}; got more");
        }
    }
}

size_t shallow_part(std::string_view text) {
    int depth = 0;
    for (size_t at = 0; at < text.size(); at++) {
        if (text[at] == '[' || text[at] == '{') {
            if (++depth > deepest_text) return at;
        } else if (text[at] == ']' || text[at] == '}') {
            depth = std::max(0, depth - 1);
        }
    }
    return text.size();
}

void check_nesting(std::string_view where, std::string_view text) {
    if (shallow_part(text) < text.size()) {
        fail(where, "expected brackets nested at most ", deepest_text, " deep; got more");
    }
}

StackGuard::StackGuard() : previous_(stack_base) {
    if (stack_base == nullptr) {
        stack_base = reinterpret_cast<const char*>(this);
    }
}

StackGuard::~StackGuard() { stack_base = previous_; }

}  // namespace lkv
