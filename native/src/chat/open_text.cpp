#include "chat/open_text.h"

#include <algorithm>
#include <cctype>

#include "chat-peg-parser.h"

namespace lkv {
namespace {

using Builder = common_chat_peg_builder;

bool is_blank(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

std::string_view without_trailing_blanks(std::string_view text) {
    while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
    return text;
}

// The nodes on the way to the end of what was parsed, the innermost last; empty where the end is not inside all of them.
std::vector<const common_peg_ast_node*> open_nodes(const common_peg_ast_arena& ast,
                                                   const common_peg_parse_result& result, size_t size) {
    std::vector<const common_peg_ast_node*> nodes;
    const std::vector<common_peg_ast_id>* children = &result.nodes;
    while (!children->empty()) {
        const common_peg_ast_node& node = ast.get(children->back());
        if (!node.is_partial || node.end != size) return {};
        nodes.push_back(&node);
        children = &node.children;
    }
    return nodes;
}

}  // namespace

std::string escaped(std::string_view text) {
    const std::string quoted = common_json(std::string(text)).dump_safe();
    return quoted.substr(1, quoted.size() - 2);
}

OpenText::OpenText(const common_chat_parser_params& params)
    : params_(params),
      is_plain_(params.format != COMMON_CHAT_FORMAT_PEG_GEMMA4 && params.format != COMMON_CHAT_FORMAT_PEG_MINIMAX_M3),
      content_(ends_of(Builder::CONTENT)),
      reasoning_(ends_of(Builder::REASONING)),
      string_argument_(ends_of(Builder::TOOL_ARG_STRING_VALUE)) {}

OpenText::Ends OpenText::ends_of(const char* tag) const {
    Ends ends;
    const common_peg_arena& arena = params_.parser;
    for (common_peg_parser_id id = 0; id < arena.size(); id++) {
        const auto* const tagged = std::get_if<common_peg_tag_parser>(&arena.get(id));
        if (tagged != nullptr && tagged->tag == tag) add_ends(tagged->child, ends);
    }
    return ends;
}

void OpenText::add_ends(common_peg_parser_id id, Ends& ends) const {
    const common_peg_arena& arena = params_.parser;
    const auto& parser = arena.get(id);
    if (const auto* const until = std::get_if<common_peg_until_parser>(&parser)) {
        ends.delimiters.insert(ends.delimiters.end(), until->delimiters.begin(), until->delimiters.end());
    } else if (const auto* const schema = std::get_if<common_peg_schema_parser>(&parser)) {
        add_ends(schema->child, ends);
    } else if (const auto* const rule = std::get_if<common_peg_rule_parser>(&parser)) {
        if (!rule->name.starts_with("json-")) add_ends(rule->child, ends);
    } else if (const auto* const sequence = std::get_if<common_peg_sequence_parser>(&parser)) {
        // no marker here, any character, and then up to the marker
        const auto& children = sequence->children;
        const bool is_chunk = children.size() == 3 &&
                              std::holds_alternative<common_peg_not_parser>(arena.get(children[0])) &&
                              std::holds_alternative<common_peg_any_parser>(arena.get(children[1])) &&
                              std::holds_alternative<common_peg_until_parser>(arena.get(children[2]));
        ends.known = ends.known && is_chunk;
        if (is_chunk) add_ends(children[2], ends);
    } else {
        ends.known = false;
    }
}

void OpenText::open(Part part, const Ends* ends, size_t read) {
    part_ = part;
    ends_ = ends;
    read_ = read;
}

void OpenText::find(std::string_view text, const common_chat_msg& message) {
    part_ = Part::none;
    if (!is_plain_) return;
    common_peg_parse_context context(params_.generation_prompt + std::string(text), COMMON_PEG_PARSE_FLAG_LENIENT);
    const common_peg_parse_result result = params_.parser.parse(context);
    if (!result.need_more_input()) return;
    const auto nodes = open_nodes(context.ast, result, context.input.size());
    const auto tagged = std::find_if(nodes.rbegin(), nodes.rend(), [](const auto* node) { return !node->tag.empty(); });
    if (tagged == nodes.rend() || (*tagged)->text.empty()) return;
    const std::string& tag = (*tagged)->tag;
    const std::string_view said = (*tagged)->text;
    const bool in_json = nodes.back()->rule == "json-string";
    if (nodes.back() != *tagged && !in_json) return;

    // where a mapper did something else with the text, the message does not end with it
    const auto open_if = [&](Part part, const Ends& ends, bool is_last) {
        if (is_last && (in_json || ends.known)) open(part, in_json ? nullptr : &ends, text.size());
    };
    if (tag == Builder::CONTENT) {
        open_if(Part::content, content_, message.tool_calls.empty() && message.content.ends_with(said));
    } else if (tag == Builder::REASONING) {
        open_if(Part::reasoning, reasoning_,
                message.content.empty() && message.tool_calls.empty() && message.reasoning_content.ends_with(said));
    } else if (message.tool_calls.empty()) {
        return;
    } else if (const std::string& arguments = message.tool_calls.back().arguments; tag == Builder::TOOL_ARGS) {
        const std::string_view shown = without_trailing_blanks(said);
        if (in_json && arguments == shown) open(Part::arguments, nullptr, text.size() - (said.size() - shown.size()));
    } else if (tag == Builder::TOOL_ARG_STRING_VALUE && !in_json) {
        open_if(Part::string_argument, string_argument_, arguments.ends_with('"' + escaped(said)));
    }
}

std::string_view OpenText::take(std::string_view text) {
    const std::string_view more = text.substr(read_);
    size_t n = ends_ != nullptr ? take_until_delimiter(more) : take_json_string(more);
    if (part_ == Part::arguments) n = without_trailing_blanks(more.substr(0, n)).size();  // which end no arguments
    if (part_ == Part::none) return {};
    read_ += n;
    return more.substr(0, n);
}

// Bytes that no delimiter takes part in.
size_t OpenText::take_until_delimiter(std::string_view more) {
    for (size_t at = 0; at < more.size(); at++) {
        const std::string_view rest = more.substr(at);
        for (const std::string& delimiter : ends_->delimiters) {
            if (rest.starts_with(delimiter)) {
                part_ = Part::none;
                return 0;
            }
            if (std::string_view(delimiter).starts_with(rest)) return at;
        }
    }
    return more.size();
}

// Bytes up to an escape that is not whole.
size_t OpenText::take_json_string(std::string_view more) {
    constexpr size_t unicode_escape = 6;
    size_t at = 0;
    while (at < more.size()) {
        if (more[at] == '"') {
            part_ = Part::none;
            return 0;
        }
        if (more[at] != '\\') {
            at++;
            continue;
        }
        if (at + 1 == more.size()) return at;
        if (more[at + 1] != 'u') {
            if (std::string_view("\"\\/bfnrt").find(more[at + 1]) == std::string_view::npos) {
                part_ = Part::none;
                return 0;
            }
            at += 2;
            continue;
        }
        const std::string_view escape = more.substr(at, unicode_escape);
        if (!std::all_of(escape.begin() + 2, escape.end(), [](unsigned char c) { return std::isxdigit(c) != 0; })) {
            part_ = Part::none;
            return 0;
        }
        if (escape.size() < unicode_escape) return at;
        at += unicode_escape;
    }
    return at;
}

}  // namespace lkv
