#include "runtime/sampler.h"

#include <cmath>
#include <exception>
#include <limits>
#include <random>

#include "base/error.h"
#include "base/log.h"

namespace lkv {
namespace {

constexpr size_t min_keep = 1;
constexpr int32_t mirostat_m = 100;              // tokens that estimate Zipf's exponent, as in the paper and llama.cpp
constexpr int32_t max_penalty_last_n = 1 << 24;  // libllama allocates this many ids

void check_range(const char* name, float value, float low, float high) {
    if (!(value >= low && value <= high)) {  // also refuses NaN
        fail("sampler", "expected ", name, " from ", low, " to ", high, "; got ", value);
    }
}

void check(const SamplerOptions& o, int32_t n_vocab) {
    constexpr float largest = std::numeric_limits<float>::max();
    if (n_vocab < 1) {
        fail("sampler", "expected at least one logit; got n_vocab ", n_vocab);
    }
    check_range("temperature", o.temperature, -largest, largest);
    check_range("top_p", o.top_p, 0, largest);
    check_range("min_p", o.min_p, 0, 1);
    check_range("typical_p", o.typical_p, 0, largest);
    check_range("repeat_penalty", o.repeat_penalty, 1e-6f, 1e6f);
    check_range("frequency_penalty", o.frequency_penalty, -largest, largest);
    check_range("presence_penalty", o.presence_penalty, -largest, largest);
    check_range("mirostat_tau", o.mirostat_tau, 0, largest);
    check_range("mirostat_eta", o.mirostat_eta, 0, largest);
    if (o.penalty_last_n < 0 || o.penalty_last_n > max_penalty_last_n) {
        fail("sampler", "expected penalty_last_n from 0 to ", max_penalty_last_n, "; got ", o.penalty_last_n);
    }
    if (o.mirostat_mode < 0 || o.mirostat_mode > 2) {
        fail("sampler", "expected mirostat_mode 0, 1 or 2; got ", o.mirostat_mode);
    }
    for (const auto& [token, bias] : o.logit_bias) {
        if (token < 0 || token >= n_vocab) {
            fail("sampler", "expected token ids from 0 to ", n_vocab - 1, " in logit_bias; got ", token);
        }
        if (std::isnan(bias) || bias == std::numeric_limits<float>::infinity()) {
            fail("sampler", "expected a bias below +inf for token ", token, "; got ", bias);
        }
    }
}

uint32_t chosen_seed(uint32_t asked) {
    std::random_device source;
    while (asked == SamplerOptions::random_seed) {
        asked = static_cast<uint32_t>(source());
    }
    return asked;
}

// The caller's biases and the tokens that the vocabulary never wants generated.
std::vector<llama_logit_bias> biases(const SamplerOptions& options, int32_t n_vocab, const Vocab* vocab) {
    std::vector<llama_logit_bias> out;
    for (const auto& [token, bias] : options.logit_bias) {
        out.push_back({token, bias});
    }
    int32_t n_suppressed = 0;
    const llama_token* suppressed =
        vocab != nullptr ? llama_vocab_get_suppress_tokens(vocab->get(), &n_suppressed) : nullptr;
    for (int32_t i = 0; i < n_suppressed; ++i) {
        if (suppressed[i] < n_vocab) {
            out.push_back({suppressed[i], -std::numeric_limits<float>::infinity()});
        }
    }
    return out;
}

llama_sampler* new_chain(const SamplerOptions& o, int32_t n_vocab, uint32_t seed, const Vocab* vocab) {
    llama_sampler* const chain = llama_sampler_chain_init({/*no_perf=*/true});
    const auto add = [chain](llama_sampler* sampler) { llama_sampler_chain_add(chain, sampler); };

    if (const auto bias = biases(o, n_vocab, vocab); !bias.empty()) {
        add(llama_sampler_init_logit_bias(n_vocab, static_cast<int32_t>(bias.size()), bias.data()));
    }
    add(llama_sampler_init_penalties(n_vocab, o.penalty_last_n, o.repeat_penalty, o.frequency_penalty,
                                     o.presence_penalty));
    if (o.temperature <= 0) {
        add(llama_sampler_init_greedy());
    } else if (o.mirostat_mode == 1) {
        add(llama_sampler_init_temp(o.temperature));
        add(llama_sampler_init_mirostat(n_vocab, seed, o.mirostat_tau, o.mirostat_eta, mirostat_m));
    } else if (o.mirostat_mode == 2) {
        add(llama_sampler_init_temp(o.temperature));
        add(llama_sampler_init_mirostat_v2(seed, o.mirostat_tau, o.mirostat_eta));
    } else {
        add(llama_sampler_init_top_k(o.top_k));
        add(llama_sampler_init_typical(o.typical_p, min_keep));
        add(llama_sampler_init_top_p(o.top_p, min_keep));
        add(llama_sampler_init_min_p(o.min_p, min_keep));
        add(llama_sampler_init_temp(o.temperature));
        add(llama_sampler_init_dist(seed));
    }
    return chain;
}

llama_sampler* new_grammar(const SamplerOptions& options, const Vocab* vocab) {
    if (!options.grammar || options.grammar->empty()) return nullptr;
    if (vocab == nullptr) {
        fail("sampler", "expected a file with a tokenizer for grammar; got none");
    }
    const LibraryErrorCapture capture;
    llama_sampler* const grammar =
        llama_sampler_init_grammar(vocab->get(), options.grammar->c_str(), options.grammar_root.c_str());
    if (grammar == nullptr) {
        fail("sampler", "expected a GBNF grammar with the rule ", quoted(options.grammar_root),
             "; got one that does not parse", capture.first().empty() ? "" : ": ",
             capture.first().empty() ? "" : quoted(capture.first()));
    }
    return grammar;
}

}  // namespace

Sampler::Sampler(const SamplerOptions& options, int32_t n_vocab, const Vocab* vocab)
    : n_vocab_(n_vocab), seed_(chosen_seed(options.seed)) {
    check(options, n_vocab);
    grammar_.reset(new_grammar(options, vocab));
    chain_.reset(new_chain(options, n_vocab, seed_, vocab));
    candidates_.resize(static_cast<size_t>(n_vocab));
}

int32_t Sampler::sample(std::span<const float> logits) {
    if (logits.size() != candidates_.size()) {
        fail("sampler", "expected ", candidates_.size(), " logits; got ", logits.size());
    }
    constexpr float infinity = std::numeric_limits<float>::infinity();
    for (int32_t token = 0; token < n_vocab_; ++token) {
        if (std::isnan(logits[token]) || logits[token] == infinity) {
            fail("sampler", "expected logits below +inf; got ", logits[token], " for token ", token);
        }
        candidates_[token] = {token, logits[token], 0.0f};
    }
    llama_token_data_array row = {candidates_.data(), candidates_.size(), /*selected=*/-1, /*sorted=*/false};
    try {
        if (grammar_) {
            llama_sampler_apply(grammar_.get(), &row);
        }
        llama_sampler_apply(chain_.get(), &row);
    } catch (const std::exception& error) {
        fail("sampler", "expected logits for the tokens of the vocabulary; got ", quoted(error.what()));
    }
    const bool possible =
        row.selected >= 0 && static_cast<size_t>(row.selected) < row.size && row.data[row.selected].logit > -infinity;
    if (!possible) {
        fail("sampler", "expected at least one possible token; got none after ",
             grammar_ ? "the grammar and the biases" : "the biases");
    }
    return row.data[row.selected].id;
}

bool Sampler::grammar_allows(int32_t token) const {
    llama_token_data candidate = {token, 0.0f, 0.0f};
    llama_token_data_array row = {&candidate, 1, -1, false};
    llama_sampler_apply(grammar_.get(), &row);
    return candidate.logit > -std::numeric_limits<float>::infinity();
}

void Sampler::accept(int32_t token, bool in_grammar) {
    if (token < 0 || token >= n_vocab_) {
        fail("sampler", "expected a token id from 0 to ", n_vocab_ - 1, "; got ", token);
    }
    if (grammar_ && in_grammar) {
        if (!grammar_allows(token)) {  // libllama would abort on an end of generation the grammar does not allow
            fail("sampler", "expected a token that the grammar allows; got ", token);
        }
        llama_sampler_accept(grammar_.get(), token);
    }
    llama_sampler_accept(chain_.get(), token);
}

void Sampler::reset() {
    if (grammar_) {
        llama_sampler_reset(grammar_.get());
    }
    llama_sampler_reset(chain_.get());
}

}  // namespace lkv
