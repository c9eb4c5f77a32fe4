#include "chat/parser.h"

#include <random>

#include "base/error.h"
#include "base/log.h"
#include "chat-peg-parser.h"
#include "chat/limits.h"
#include "chat/reason.h"

namespace lkv {
namespace {

std::string new_call_id() {
    constexpr std::string_view letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    static thread_local std::mt19937_64 random{std::random_device{}()};
    std::string id = "call_";
    for (int i = 0; i < 24; i++) {
        id += letters[std::uniform_int_distribution<size_t>(0, letters.size() - 1)(random)];
    }
    return id;
}

// Adds text to what a message ends with.
void extend(common_chat_msg& message, std::string_view text) {
    if (!message.tool_calls.empty()) {
        message.tool_calls.back().arguments += text;
    } else if (message.content.empty() && !message.reasoning_content.empty()) {
        message.reasoning_content += text;
    } else {
        message.content += text;
    }
}

// A model may write any number of brackets, but the parser recurses: it reads the text before they are nested
// too deep, and the rest is taken as it is.
common_chat_msg parsed(std::string_view text, bool is_partial, const common_chat_parser_params& params) {
    const std::string_view head = text.substr(0, shallow_part(text));
    const std::string_view rest = text.substr(head.size());
    const LibraryErrorCapture capture;
    try {
        common_chat_msg message = common_chat_parse(std::string(head), is_partial || !rest.empty(), params);
        extend(message, rest);
        return message;
    } catch (const std::exception& error) {
        fail("chat", "expected an answer in the format of the template; got ", reason(error));
    }
}

common_json delta(const common_chat_msg_diff& diff) {
    auto out = common_json::object();
    if (!diff.reasoning_content_delta.empty()) {
        out["reasoning_content"] = diff.reasoning_content_delta;
    }
    if (!diff.content_delta.empty()) {
        out["content"] = diff.content_delta;
    }
    if (diff.tool_call_index == std::string::npos) return out;
    const common_chat_tool_call& call = diff.tool_call_delta;
    auto entry = common_json::object();
    entry["index"] = diff.tool_call_index;
    auto function = common_json::object();
    if (!call.id.empty()) {
        entry["id"] = call.id;
        entry["type"] = "function";
    }
    if (!call.name.empty()) {
        function["name"] = call.name;
    }
    function["arguments"] = call.arguments;
    entry["function"] = function;
    auto calls = common_json::array();
    calls.push_back(entry);
    out["tool_calls"] = calls;
    return out;
}

// A format without rules is all content, as llama.cpp reads it.
ChatParser with_rules(ChatParser parser) {
    if (!parser.params().parser.empty()) return parser;
    common_chat_parser_params params = parser.params();
    params.parser = build_chat_peg_parser([](common_chat_peg_builder& p) { return p.content(p.rest()) + p.end(); });
    return ChatParser(std::move(params));
}

std::string to_json(const common_chat_msg& message) {
    auto out = message.to_json_oaicompat();
    out["role"] = "assistant";
    if (message.content.empty() && !message.tool_calls.empty()) {
        out["content"] = nullptr;
    }
    return out.dump_safe();
}

}  // namespace

std::string ChatParser::parse(std::string_view text, bool is_partial) const {
    common_chat_msg message = parsed(text, is_partial, params_);
    std::vector<std::string> ids;
    message.set_tool_call_ids(ids, new_call_id);
    return to_json(message);
}

ChatStream::ChatStream(ChatParser parser) : parser_(with_rules(std::move(parser))), end_(parser_.params()) {
    if (parser_.params().is_continuation) {
        begun_ = message_ = parsed("", true, parser_.params());
    }
}

std::vector<std::string> ChatStream::push(std::string_view text, bool is_partial) {
    text_ += text;
    if (is_partial && end_.is_open()) {
        const std::string_view more = end_.take(text_);
        if (end_.is_open()) return extended(more);
    }
    if (is_partial && !may_parse()) return {};
    return parsed_anew(is_partial);
}

bool ChatStream::may_parse() const {
    constexpr size_t at_once = 1 << 16;  // bytes, over all parses of a short answer
    constexpr size_t times = 64;         // that a byte of a long one is parsed
    return n_parsed_ + text_.size() <= at_once + times * text_.size();
}

std::vector<std::string> ChatStream::extended(std::string_view more) {
    if (more.empty()) return {};
    common_chat_msg_diff added;
    switch (end_.part()) {
        case OpenText::Part::content:
            added.content_delta = more;
            message_.content += more;
            break;
        case OpenText::Part::reasoning:
            added.reasoning_content_delta = more;
            message_.reasoning_content += more;
            break;
        default: {
            const bool is_value = end_.part() == OpenText::Part::string_argument;
            added.tool_call_index = message_.tool_calls.size() - 1;
            added.tool_call_delta.arguments = is_value ? escaped(more) : std::string(more);
            message_.tool_calls.back().arguments += added.tool_call_delta.arguments;
        }
    }
    return {delta(added).dump_safe()};
}

std::vector<std::string> ChatStream::parsed_anew(bool is_partial) {
    n_parsed_ += text_.size();
    common_chat_msg grown = parsed(text_, is_partial, parser_.params());
    std::vector<std::string> deltas;
    if (grown.empty()) return deltas;
    grown.set_tool_call_ids(ids_, new_call_id);
    try {
        for (const auto& diff : common_chat_msg_diff::compute_diffs(message_, grown)) {
            deltas.push_back(delta(diff).dump_safe());
        }
    } catch (const std::exception& error) {
        fail("chat", "expected an answer that goes on as it began; got ", reason(error));
    }
    message_ = std::move(grown);
    if (is_partial) end_.find(text_, message_);
    return deltas;
}

std::string ChatStream::message() const {
    common_chat_msg rest = message_;
    const auto drop = [](std::string& text, const std::string& begun) {
        if (text.starts_with(begun)) {
            text.erase(0, begun.size());
        }
    };
    drop(rest.content, begun_.content);
    drop(rest.reasoning_content, begun_.reasoning_content);
    return to_json(rest);
}

}  // namespace lkv
