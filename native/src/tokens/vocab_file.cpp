// Loading: the vocabulary of a GGUF, copied for libllama.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <unordered_set>

#include "base/error.h"
#include "base/log.h"
#include "gguf.h"
#include "tokens/vocab.h"

namespace lkv {
namespace {

constexpr std::string_view model_key = "tokenizer.ggml.model";
constexpr std::string_view tokens_key = "tokenizer.ggml.tokens";
constexpr std::string_view template_key = "tokenizer.chat_template";
// Ours: ends of a checkpoint that has more of them than libllama has keys for.
constexpr std::string_view ends_key = "tokenizer.ggml.eog_token_ids";

// SentencePiece, byte-level BPE, unigram and their descendants: the tokenizers of decoders.
constexpr std::array<std::string_view, 4> supported = {"llama", "gpt2", "t5", "gemma4"};

constexpr std::array<std::string_view, 4> named_tokens = {"</s>", "<unk>", "<s>", "<|endoftext|>"};

using Bytes = std::vector<uint8_t>;

template <typename T>
void put(Bytes& out, T value) {
    out.resize(out.size() + sizeof(T));
    std::memcpy(out.data() + out.size() - sizeof(T), &value, sizeof(T));
}

void put(Bytes& out, std::string_view text) {
    put<uint64_t>(out, text.size());
    out.insert(out.end(), text.begin(), text.end());
}

// libllama knows Phi-3's whitespace rules by general.name, and then looks these tokens up without asking.
bool has_named_tokens(const GgufFile& file) {
    const auto tokens = file.get_string_array(tokens_key);
    return std::all_of(named_tokens.begin(), named_tokens.end(), [&tokens](std::string_view name) {
        return std::find(tokens.begin(), tokens.end(), name) != tokens.end();
    });
}

Bytes vocabulary_file(const GgufFile& file) {
    const bool with_name = has_named_tokens(file);
    Bytes entries;
    uint64_t n_values = 1;
    put(entries, std::string_view("general.architecture"));
    put(entries, static_cast<uint32_t>(GgufType::string));
    put(entries, std::string_view("llama"));
    for (const auto& value : file.values()) {
        if (value.key.starts_with("tokenizer.") || (with_name && value.key == "general.name")) {
            entries.insert(entries.end(), value.raw.begin(), value.raw.end());
            ++n_values;
        }
    }
    Bytes out = {'G', 'G', 'U', 'F'};
    put<uint32_t>(out, 3);
    put<uint64_t>(out, 0);  // tensors
    put(out, n_values);
    out.insert(out.end(), entries.begin(), entries.end());
    return out;
}

// What libllama asserts, and would abort the process for.
void check_tokens(const GgufFile& file) {
    const auto tokens = file.get_string_array(tokens_key);
    if (tokens.empty() || tokens.size() > std::numeric_limits<int32_t>::max()) {
        fail("vocab", "expected 1 to 2^31 - 1 tokens in ", tokens_key, "; got ", tokens.size());
    }
    std::unordered_set<std::string_view> seen;
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i].find('\0') != std::string_view::npos) {
            fail("vocab", "expected tokens without NUL; got ", quoted(tokens[i]), " as token ", i);
        }
        if (!tokens[i].empty() && !seen.insert(tokens[i]).second) {
            fail("vocab", "expected every token once; got ", quoted(tokens[i]), " again as token ", i);
        }
    }
}

// libllama's message without the names of the functions and stages it came through.
std::string_view reason(std::string_view message) {
    constexpr std::string_view stage = "error loading model vocabulary: ";
    const size_t at = message.find(stage);
    return at == std::string_view::npos ? message : message.substr(at + stage.size());
}

}  // namespace

std::optional<Vocab> Vocab::from(const GgufFile& file) {
    const auto kind = file.find_string(model_key);
    if (!kind || *kind == "none" || *kind == "no_vocab") return std::nullopt;
    if (std::find(supported.begin(), supported.end(), *kind) == supported.end()) {
        fail("vocab", "expected ", model_key, " to be llama, gpt2, t5 or gemma4; got ", quoted(*kind));
    }
    check_tokens(file);

    install_library_logging();
    const Bytes bytes = vocabulary_file(file);
    const std::unique_ptr<gguf_context, decltype(&gguf_free)> metadata(
        gguf_init_from_buffer(bytes.data(), bytes.size(), {/*no_alloc=*/true, /*ctx=*/nullptr}), gguf_free);
    if (!metadata) {
        fail("vocab", "expected tokenizer.* keys that libllama reads; got a refusal of their copy");
    }
    std::array<ggml_backend_dev_t, 1> no_devices = {nullptr};
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    params.devices = no_devices.data();
    params.n_gpu_layers = 0;

    const LibraryErrorCapture capture;
    std::unique_ptr<llama_model, Release> model(llama_model_init_from_user(metadata.get(), nullptr, nullptr, params));
    if (!model) {
        const std::string_view why = reason(capture.first());
        if (why.ends_with("std::bad_alloc")) throw std::bad_alloc();
        fail("vocab", "expected a tokenizer that libllama loads; got ", quoted(why));
    }
    std::optional<std::string> chat_template;
    if (const auto text = file.find_string(template_key)) {
        chat_template = *text;
    }
    return Vocab(std::move(model), std::move(chat_template),
                 file.find_i32_array(ends_key).value_or(std::vector<int32_t>()));
}

}  // namespace lkv
