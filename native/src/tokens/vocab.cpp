#include "tokens/vocab.h"

#include <algorithm>
#include <exception>
#include <limits>

#include "base/error.h"

namespace lkv {
namespace {

// Calls into libllama that grow their output: `call(data, capacity)` returns the length, or minus the length needed.
template <typename Container, typename Call>
Container filled(size_t guess, const Call& call) {
    Container out(guess, {});
    int32_t n = call(out.data(), static_cast<int32_t>(out.size()));
    if (n < 0 && n != std::numeric_limits<int32_t>::min()) {
        out.resize(static_cast<size_t>(-n));
        n = call(out.data(), static_cast<int32_t>(out.size()));
    }
    if (n < 0) {
        fail("vocab", "expected a result below 2^31; got more");
    }
    out.resize(static_cast<size_t>(n));
    return out;
}

}  // namespace

Vocab::Vocab(std::unique_ptr<llama_model, Release> model, std::optional<std::string> chat_template,
             std::vector<int32_t> further_ends)
    : model_(std::move(model)),
      vocab_(llama_model_get_vocab(model_.get())),
      chat_template_(std::move(chat_template)),
      further_ends_(std::move(further_ends)) {
    for (const int32_t token : further_ends_) check_token(token);
    // libllama asserts both when it tokenizes.
    if (add_bos() && bos() < 0) {
        fail("vocab", "expected tokenizer.ggml.bos_token_id in the vocabulary, as add_bos_token is set; got none");
    }
    if (llama_vocab_get_add_eos(vocab_) && eos() < 0) {
        fail("vocab", "expected tokenizer.ggml.eos_token_id in the vocabulary, as add_eos_token is set; got none");
    }
    const auto probe = tokenize("a", false, false);
    space_prefix_ = !probe.empty() && token_to_piece(probe[0]).starts_with(' ');
}

int32_t Vocab::n_tokens() const { return llama_vocab_n_tokens(vocab_); }

std::vector<int32_t> Vocab::tokenize(std::string_view text, bool add_special, bool parse_special) const {
    constexpr size_t longest = std::numeric_limits<int32_t>::max() / 2;
    if (text.size() > longest) {
        fail("vocab", "expected a text of at most ", longest, " bytes; got ", text.size(), ": tokenize it in pieces");
    }
    try {
        return filled<std::vector<int32_t>>(text.size() / 3 + 8, [&](llama_token* out, int32_t capacity) {
            return llama_tokenize(vocab_, text.data(), static_cast<int32_t>(text.size()), out, capacity, add_special,
                                  parse_special);
        });
    } catch (const Error&) {
        throw;
    } catch (const std::exception& error) {  // a vocabulary without the tokens its own tokenizer falls back to
        fail("vocab", "expected a vocabulary that covers the text; got ", quoted(error.what()));
    }
}

std::string Vocab::token_to_piece(int32_t token, bool special) const {
    check_token(token);
    return filled<std::string>(16, [&](char* out, int32_t capacity) {
        return llama_token_to_piece(vocab_, token, out, capacity, /*lstrip=*/0, special);
    });
}

std::string Vocab::detokenize(std::span<const int32_t> tokens, bool special) const {
    std::string out;
    bool drop_space = false;
    for (size_t i = 0; i < tokens.size(); ++i) {
        const std::string piece = token_to_piece(tokens[i], special);
        out += drop_space && piece.starts_with(' ') ? piece.substr(1) : piece;
        drop_space = space_prefix_ && i == 0 && tokens[0] == bos();
    }
    return out;
}

int32_t Vocab::bos() const { return llama_vocab_bos(vocab_); }
int32_t Vocab::eos() const { return llama_vocab_eos(vocab_); }
int32_t Vocab::nl() const { return llama_vocab_nl(vocab_); }
int32_t Vocab::fim_prefix() const { return llama_vocab_fim_pre(vocab_); }
int32_t Vocab::fim_suffix() const { return llama_vocab_fim_suf(vocab_); }
int32_t Vocab::fim_middle() const { return llama_vocab_fim_mid(vocab_); }
int32_t Vocab::fim_repo() const { return llama_vocab_fim_rep(vocab_); }
int32_t Vocab::fim_file() const { return llama_vocab_fim_sep(vocab_); }
bool Vocab::add_bos() const { return llama_vocab_get_add_bos(vocab_); }

bool Vocab::is_eog(int32_t token) const {
    check_token(token);
    return llama_vocab_is_eog(vocab_, token) ||
           std::find(further_ends_.begin(), further_ends_.end(), token) != further_ends_.end();
}

int32_t Vocab::find_token(std::string_view text) const {
    for (int32_t token = 0; token < n_tokens(); ++token) {
        if (llama_vocab_get_text(vocab_, token) == text) return token;
    }
    return -1;
}

void Vocab::check_token(int32_t token) const {
    if (token < 0 || token >= n_tokens()) {
        fail("vocab", "expected a token id from 0 to ", n_tokens() - 1, "; got ", token);
    }
}

}  // namespace lkv
