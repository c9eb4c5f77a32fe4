// A chat template: what a conversation looks like to the model, and how its answer is to be read. llama.cpp's code for both.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "chat.h"
#include "chat/parser.h"
#include "tokens/vocab.h"

namespace lkv {

// A conversation, ready for the model.
struct ChatPrompt {
    common_chat_params params;  // prompt, grammar, triggers, preserved tokens, stops
    ChatParser parser;
    // the grammar describes the answer from generation_prompt on, which the prompt ends with, and has to be told that first
    bool grammar_from_generation_prompt = false;
};

class ChatTemplates {
public:
    // source: Jinja; empty: the vocabulary's own, ChatML where it has none. vocab: null for a source without a model, which then
    // sees bos_token and eos_token; else it outlives this. Errors: Error `[chat template] …`.
    ChatTemplates(const Vocab* vocab, const std::string& source, const std::string& bos_token,
                  const std::string& eos_token);

    std::string source() const;
    std::map<std::string, bool> capabilities() const;  // supports_tools, supports_tool_calls, supports_system_role, …
    bool supports_thinking() const;                    // enable_thinking changes what it writes

    // request: a JSON object as docs of ChatTemplates.apply in _core.pyi. Errors: Error `[chat …] …`, `[tools] …`, `[messages] …`,
    // `[json_schema] …`.
    ChatPrompt apply(const std::string& request) const;

private:
    common_chat_templates_ptr templates_;
};

}  // namespace lkv
