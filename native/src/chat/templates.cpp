#include "chat/templates.h"

#include <functional>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "chat/limits.h"
#include "chat/reason.h"

namespace lkv {
namespace {

// Calls llama.cpp; whatever it throws becomes one line.
template <typename Call>
auto checked(std::string_view where, std::string_view wanted, const Call& call) {
    const LibraryErrorCapture capture;
    const StackGuard guard;
    try {
        return call();
    } catch (const Error&) {
        throw;
    } catch (const std::exception& error) {
        const std::string why = reason(error);
        // some of its code rethrows a slice of the exception, and has logged what it was
        fail(where, "expected ", wanted, "; got ", why == "std::exception" ? lkv::quoted(capture.first()) : why);
    }
}

common_json parse_request(const std::string& text) {
    check_nesting("chat", text);
    auto request = common_json::parse(text);
    if (!request.is_object() || !request.contains("messages")) {
        fail("chat", "expected a JSON object with messages; got ", lkv::quoted(text));
    }
    return request;
}

common_json value_or_null(const common_json& request, const char* key) {
    return request.contains(key) ? request.at(key) : common_json(nullptr);
}

template <typename T>
T value_or(const common_json& request, const char* key, T other) {
    const common_json value = value_or_null(request, key);
    return value.is_null() ? other : value.get<T>();
}

void add_kwargs(const common_json& request, common_chat_templates_inputs& inputs) {
    const common_json kwargs = value_or_null(request, "chat_template_kwargs");
    if (kwargs.is_null()) return;
    if (!kwargs.is_object()) {
        fail("chat_template_kwargs", "expected a JSON object; got ", lkv::quoted(kwargs.dump()));
    }
    for (const auto& [key, value] : kwargs.items()) {
        inputs.chat_template_kwargs[key] = value.dump();
        if (key == "enable_thinking") {
            if (!value.is_boolean()) {
                fail("chat_template_kwargs", "expected enable_thinking to be true or false; got ",
                     lkv::quoted(value.dump()));
            }
            inputs.enable_thinking = value.get<bool>();
        }
    }
}

void add_continuation(const common_json& request, common_chat_templates_inputs& inputs) {
    const common_json value = value_or_null(request, "continue_final_message");
    inputs.continue_final_message = common_chat_continuation_parse(value);
    if (inputs.continue_final_message == COMMON_CHAT_CONTINUATION_NONE) {
        if (!value.is_null() && !(value.is_boolean() && !value.get<bool>())) {
            fail("continue_final_message", "expected true, false, content or reasoning_content; got ",
                 lkv::quoted(value.dump()));
        }
        return;
    }
    if (inputs.messages.empty() || inputs.messages.back().role != "assistant") {
        fail("continue_final_message", "expected an assistant's message at the end; got ",
             inputs.messages.empty() ? "none" : lkv::quoted(inputs.messages.back().role));
    }
    inputs.add_generation_prompt = false;
}

common_chat_templates_inputs inputs_of(const common_json& request, bool parallel_tool_calls) {
    common_chat_templates_inputs inputs;
    inputs.messages = checked("messages", "OpenAI's messages",
                              [&] { return common_chat_msgs_parse_oaicompat(request.at("messages")); });
    inputs.tools = checked("tools", "OpenAI's function tools",
                           [&] { return common_chat_tools_parse_oaicompat(value_or_null(request, "tools")); });
    inputs.tool_choice = checked("tool_choice", "auto, none or required", [&] {
        return common_chat_tool_choice_parse_oaicompat(value_or<std::string>(request, "tool_choice", "auto"));
    });
    inputs.parallel_tool_calls = value_or(request, "parallel_tool_calls", parallel_tool_calls);
    const common_json schema = value_or_null(request, "json_schema");
    inputs.json_schema = schema.is_null() ? "" : schema.dump();
    inputs.grammar = value_or<std::string>(request, "grammar", "");
    inputs.add_generation_prompt = value_or(request, "add_generation_prompt", true);
    inputs.enable_thinking = value_or(request, "enable_thinking", true);
    inputs.reasoning_format = checked("reasoning_format", "none, auto, deepseek or deepseek-legacy", [&] {
        return common_reasoning_format_from_name(value_or<std::string>(request, "reasoning_format", "auto"));
    });
    if (!inputs.json_schema.empty() && !inputs.grammar.empty()) {
        fail("json_schema", "expected either json_schema or grammar; got both");
    }
    add_kwargs(request, inputs);
    add_continuation(request, inputs);
    return inputs;
}

common_chat_parser_params parser_of(const common_chat_params& params, const common_chat_templates_inputs& inputs) {
    common_chat_parser_params out(params);
    out.reasoning_format = inputs.reasoning_format;
    out.parse_tool_calls = !inputs.tools.empty() && inputs.tool_choice != COMMON_CHAT_TOOL_CHOICE_NONE;
    out.is_continuation = inputs.continue_final_message != COMMON_CHAT_CONTINUATION_NONE;
    if (!params.parser.empty()) {
        out.parser.load(params.parser);
    }
    return out;
}

}  // namespace

ChatTemplates::ChatTemplates(const Vocab* vocab, const std::string& source, const std::string& bos_token,
                             const std::string& eos_token) {
    if (vocab == nullptr && source.empty()) {
        fail("chat template", "expected a model with a vocabulary, or a template; got neither");
    }
    install_library_logging();
    templates_ = checked("chat template", "valid Jinja", [&] {
        check_template(source.empty() ? vocab->chat_template().value_or("") : source);
        return common_chat_templates_init(vocab == nullptr ? nullptr : vocab->model(), source, bos_token, eos_token);
    });
}

std::string ChatTemplates::source() const { return common_chat_templates_source(templates_.get()); }

std::map<std::string, bool> ChatTemplates::capabilities() const {
    return common_chat_templates_get_caps(templates_.get());
}

bool ChatTemplates::supports_thinking() const {
    return checked("chat template", "messages that it accepts",
                   [&] { return common_chat_templates_support_enable_thinking(templates_.get()); });
}

ChatPrompt ChatTemplates::apply(const std::string& request) const {
    const bool parallel = capabilities().at("supports_parallel_tool_calls");
    const auto inputs =
        checked("chat", "a request as OpenAI's", [&] { return inputs_of(parse_request(request), parallel); });
    return checked("chat template", "messages that it accepts", [&] {
        common_chat_params params = common_chat_templates_apply(templates_.get(), inputs);
        ChatParser parser(parser_of(params, inputs));
        const bool own_grammar = inputs.grammar.empty() && !params.grammar.empty();
        return ChatPrompt{std::move(params), std::move(parser), own_grammar};
    });
}

}  // namespace lkv
