#include <pybind11/stl.h>

#include "bindings.h"
#include "chat/templates.h"
#include "gil.h"

namespace py = pybind11;
using lkv::ChatParser;
using lkv::ChatPrompt;
using lkv::ChatStream;
using lkv::ChatTemplates;

namespace {

// Keeps the model, and with it the vocabulary, alive as long as its templates.
struct PyTemplates {
    std::shared_ptr<lkv::Model> model;
    ChatTemplates templates;
};

const char* trigger_name(common_grammar_trigger_type type) {
    switch (type) {
        case COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN:
            return "token";
        case COMMON_GRAMMAR_TRIGGER_TYPE_WORD:
            return "word";
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN:
            return "pattern";
        default:
            return "pattern_full";
    }
}

py::list triggers(const std::vector<common_grammar_trigger>& list) {
    py::list out;
    for (const common_grammar_trigger& trigger : list) {
        py::dict item;
        item["type"] = trigger_name(trigger.type);
        item["value"] = trigger.value;
        item["token"] = trigger.token;
        out.append(item);
    }
    return out;
}

py::dict prompt_dict(ChatPrompt&& prompt) {
    py::dict out;
    out["prompt"] = text(prompt.params.prompt);
    out["format"] = common_chat_format_name(prompt.params.format);
    out["grammar"] = text(prompt.params.grammar);
    out["grammar_lazy"] = prompt.params.grammar_lazy;
    out["grammar_triggers"] = triggers(prompt.params.grammar_triggers);
    out["grammar_from_generation_prompt"] = prompt.grammar_from_generation_prompt;
    out["preserved_tokens"] = prompt.params.preserved_tokens;
    out["additional_stops"] = prompt.params.additional_stops;
    out["generation_prompt"] = text(prompt.params.generation_prompt);
    out["supports_thinking"] = prompt.params.supports_thinking;
    out["thinking_start_tag"] = prompt.params.thinking_start_tag;
    out["thinking_end_tags"] = prompt.params.thinking_end_tags;
    out["parser"] = std::move(prompt.parser);
    return out;
}

py::dict apply(const PyTemplates& self, const std::string& request) {
    ChatPrompt prompt = [&] {
        const Unlocked unlocked;
        return self.templates.apply(request);
    }();
    return prompt_dict(std::move(prompt));
}

}  // namespace

void bind_chat(py::module_& module) {
    using Released = py::call_guard<Unlocked>;
    py::class_<ChatParser>(module, "ChatParser")
        .def("parse", &ChatParser::parse, py::arg("text"), py::arg("is_partial"), Released())
        .def("stream", [](const ChatParser& parser) { return std::make_unique<ChatStream>(parser); });
    py::class_<ChatStream>(module, "ChatStream")
        .def("push", &ChatStream::push, py::arg("text"), py::arg("is_partial") = true, Released())
        .def_property_readonly("message", &ChatStream::message)
        .def_property_readonly("has_tool_calls", &ChatStream::has_tool_calls);
    py::class_<PyTemplates>(module, "ChatTemplates")
        .def(py::init([](const std::shared_ptr<lkv::Model>& model, const std::string& source,
                         const std::string& bos_token, const std::string& eos_token) {
                 const bool vocab = model && model->has_vocab();
                 return new PyTemplates{model,
                                        ChatTemplates(vocab ? &model->vocab() : nullptr, source, bos_token, eos_token)};
             }),
             py::arg("model"), py::arg("source") = "", py::kw_only(), py::arg("bos_token") = "",
             py::arg("eos_token") = "")
        .def_property_readonly("source", [](const PyTemplates& self) { return text(self.templates.source()); })
        .def_property_readonly("capabilities", [](const PyTemplates& self) { return self.templates.capabilities(); })
        .def_property_readonly("supports_thinking",
                               [](const PyTemplates& self) { return self.templates.supports_thinking(); })
        .def("apply", &apply, py::arg("request"));
}
