// The tokenizer of a GGUF, run by libllama. Its `tokenizer.*` entries are copied, byte for byte, to a vocabulary-only
// GGUF in memory, so any architecture string and any tensors may stand beside them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/reader.h"
#include "llama.h"

namespace lkv {

class Vocab {
public:
    // nullopt for a file without a tokenizer (random-weight files have none).
    // Errors: Error `[vocab] …` for a tokenizer that is malformed or of a kind this build does not run.
    static std::optional<Vocab> from(const GgufFile& file);

    int32_t n_tokens() const;

    // Text to ids. add_special: begin (and end) with the special tokens the file asks for. parse_special: the text of
    // special tokens becomes their ids instead of plain text. Bytes that are not UTF-8 become U+FFFD.
    std::vector<int32_t> tokenize(std::string_view text, bool add_special, bool parse_special) const;

    // Ids to bytes: the pieces one after another, so the text of a longer list begins with the text of a shorter one.
    // It may end inside a UTF-8 sequence. The space that SentencePiece puts before a text is dropped after a leading
    // BOS, elsewhere kept. special: render special tokens as text.
    std::string detokenize(std::span<const int32_t> tokens, bool special = false) const;
    std::string token_to_piece(int32_t token, bool special = false) const;

    // Ids of special tokens; -1: the vocabulary has none.
    int32_t bos() const;
    int32_t eos() const;
    int32_t nl() const;

    bool is_eog(int32_t token) const;  // ends a generation: EOS, end of turn, … and those of the file's list
    bool add_bos() const;

    // Id of an exact vocabulary entry as stored (`Ġthe`, `▁the`, `<s>`), or -1.
    int32_t find_token(std::string_view text) const;

    // The Jinja template of `tokenizer.chat_template`.
    const std::optional<std::string>& chat_template() const { return chat_template_; }

    // Fill in the middle: what stands before the text before the gap, before the text after it, and before what fills it.
    // -1: the vocabulary has none.
    int32_t fim_prefix() const;
    int32_t fim_suffix() const;
    int32_t fim_middle() const;
    // Before the name of a repository, and of each of its files.
    int32_t fim_repo() const;
    int32_t fim_file() const;

    const llama_vocab* get() const { return vocab_; }
    const llama_model* model() const { return model_.get(); }  // vocabulary and tokenizer.* keys, no weights

private:
    struct Release {
        void operator()(llama_model* model) const { llama_model_free(model); }
    };

    Vocab(std::unique_ptr<llama_model, Release> model, std::optional<std::string> chat_template,
          std::vector<int32_t> further_ends);

    void check_token(int32_t token) const;

    std::unique_ptr<llama_model, Release> model_;  // vocabulary only: no weights
    const llama_vocab* vocab_;                     // of model_
    std::optional<std::string> chat_template_;
    std::vector<int32_t> further_ends_;  // which libllama has no key for
    bool space_prefix_ = false;          // a text is tokenized with a space put before it
};

}  // namespace lkv
