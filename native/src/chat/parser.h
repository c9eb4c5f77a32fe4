// An answer's text as a message: content, reasoning, tool calls. The parser belongs to the prompt that asked for the answer.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "chat.h"
#include "chat/open_text.h"

namespace lkv {

class ChatParser {
public:
    explicit ChatParser(common_chat_parser_params params) : params_(std::move(params)) {}

    // OpenAI's message as JSON: {"role", "content", "reasoning_content", "tool_calls"}, the last two where there are any. is_partial:
    // the text may go on, and what is unfinished is left out or cut. Without it a text that does not fit the format is refused.
    // Errors: Error `[chat] …`.
    std::string parse(std::string_view text, bool is_partial) const;

    const common_chat_parser_params& params() const { return params_; }

private:
    common_chat_parser_params params_;
};

// The same answer as it grows, and what each piece adds. A text that goes on is read as it comes; elsewhere the whole is parsed
// anew, so rarely that the time stays linear in its length: what an answer adds may come out a little later then.
class ChatStream {
public:
    explicit ChatStream(ChatParser parser);
    ChatStream(const ChatStream&) = delete;  // end_ looks into parser_
    ChatStream& operator=(const ChatStream&) = delete;

    // Appends text. OpenAI's deltas, JSON each: {"content"}, {"reasoning_content"}, {"tool_calls": [{"index", "id", "type",
    // "function": {"name", "arguments"}}]}. An empty text with is_partial false ends the answer: what was held back comes out.
    std::vector<std::string> push(std::string_view text, bool is_partial);

    // The message so far, as JSON, without what the prompt began.
    std::string message() const;

    bool has_tool_calls() const { return !message_.tool_calls.empty(); }

private:
    std::vector<std::string> extended(std::string_view more);  // the message's open text by this
    std::vector<std::string> parsed_anew(bool is_partial);
    bool may_parse() const;

    ChatParser parser_;
    std::string text_;
    size_t n_parsed_ = 0;    // bytes, over all parses
    common_chat_msg begun_;  // by the prompt
    common_chat_msg message_;
    std::vector<std::string> ids_;  // of tool calls: the template's, else made up once
    OpenText end_;
};

}  // namespace lkv
