#include "runtime/sampler.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <random>

#include "base/error.h"
#include "base/log.h"

namespace lkv {
namespace {

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
    check_range("top_n_sigma", o.top_n_sigma, -largest, largest);
    check_range("xtc_probability", o.xtc_probability, 0, 1);
    check_range("xtc_threshold", o.xtc_threshold, 0, 1);
    check_range("dynatemp_range", o.dynatemp_range, 0, largest);
    check_range("dynatemp_exponent", o.dynatemp_exponent, -largest, largest);
    check_range("dry_multiplier", o.dry_multiplier, 0, largest);
    check_range("dry_base", o.dry_base, 0, largest);
    check_range("mirostat_tau", o.mirostat_tau, 0, largest);
    check_range("mirostat_eta", o.mirostat_eta, 0, largest);
    if (o.penalty_last_n < 0 || o.penalty_last_n > max_penalty_last_n) {
        fail("sampler", "expected penalty_last_n from 0 to ", max_penalty_last_n, "; got ", o.penalty_last_n);
    }
    if (o.dry_penalty_last_n < 0 || o.dry_penalty_last_n > max_penalty_last_n) {
        fail("sampler", "expected dry_penalty_last_n from 0 to ", max_penalty_last_n, "; got ", o.dry_penalty_last_n);
    }
    if (o.dry_allowed_length < 0) {
        fail("sampler", "expected dry_allowed_length of at least 0; got ", o.dry_allowed_length);
    }
    if (o.min_keep < 0) {
        fail("sampler", "expected min_keep of at least 0; got ", o.min_keep);
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

void check_logit(float logit, int32_t token) {
    if (!(logit < std::numeric_limits<float>::infinity())) {  // also refuses NaN
        fail("sampler", "expected logits below +inf; got ", logit, " for token ", token);
    }
}

struct Peak {
    float value;
    bool is_finite;  // no logit is NaN or +inf
};

constexpr size_t block_logits = 128;

Peak peak_of(std::span<const float> logits) {
    Peak peak{-std::numeric_limits<float>::infinity(), true};
    for (const float logit : logits) {
        peak.value = std::max(peak.value, logit);
        peak.is_finite = peak.is_finite && logit < std::numeric_limits<float>::infinity();
    }
    return peak;
}

// Of so many lanes compilers make vectors, of fewer they make none.
Peak peak_of_block(const float* logits) {
    constexpr size_t lanes = 32;
    float top[lanes];
    int bad[lanes] = {};
    std::copy_n(logits, lanes, top);
    for (size_t first = 0; first < block_logits; first += lanes) {
        for (size_t i = 0; i < lanes; i++) {
            const float logit = logits[first + i];
            top[i] = logit > top[i] ? logit : top[i];
            bad[i] |= logit < std::numeric_limits<float>::infinity() ? 0 : 1;
        }
    }
    int n_bad = 0;
    for (size_t i = 0; i < lanes; i++) n_bad += bad[i];
    return {*std::max_element(top, top + lanes), n_bad == 0};
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

llama_sampler* new_temperature(const SamplerOptions& o) {
    return o.dynatemp_range > 0 ? llama_sampler_init_temp_ext(o.temperature, o.dynatemp_range, o.dynatemp_exponent)
                                : llama_sampler_init_temp(o.temperature);
}

llama_sampler* new_dry(const SamplerOptions& o, const Vocab* vocab) {
    if (vocab == nullptr) {
        fail("sampler", "expected a file with a tokenizer for dry_multiplier; got none");
    }
    std::vector<const char*> breakers;
    for (const std::string& breaker : o.dry_sequence_breakers) {
        breakers.push_back(breaker.c_str());
    }
    return llama_sampler_init_dry(vocab->get(), o.dry_multiplier, o.dry_base, o.dry_allowed_length,
                                  o.dry_penalty_last_n, breakers.data(), breakers.size());
}

// It may end a text wherever it likes: a grammar would have no say, and mirostat takes the place of all samplers.
llama_sampler* new_infill(const SamplerOptions& o, const Vocab* vocab) {
    if (vocab == nullptr || llama_vocab_eos(vocab->get()) < 0) {
        fail("sampler", "expected a vocabulary with an end token for the sampler infill; got one without");
    }
    if (o.mirostat_mode != 0 || (o.grammar && !o.grammar->empty())) {
        fail("sampler", "expected no ", o.mirostat_mode != 0 ? "mirostat" : "grammar",
             " beside the sampler infill; got both");
    }
    return llama_sampler_init_infill(vocab->get());
}

// How many of the largest logits decide what the chain picks; 0: any may.
size_t deciding(const SamplerOptions& o, int32_t n_vocab, const Vocab* vocab) {
    const bool changes = o.repeat_penalty != 1 || o.frequency_penalty != 0 || o.presence_penalty != 0 ||
                         !biases(o, n_vocab, vocab).empty();
    const bool draws = o.temperature > 0 || o.infill;
    const bool needs_all = draws && (o.mirostat_mode != 0 || o.top_n_sigma > 0 || o.top_k <= 0);
    if (changes || o.dry_multiplier > 0 || needs_all) return 0;
    return !draws ? 1 : static_cast<size_t>(std::min(o.top_k, n_vocab));
}

SamplerHandle new_chain(const SamplerOptions& o, int32_t n_vocab, uint32_t seed, const Vocab* vocab) {
    SamplerHandle owner(llama_sampler_chain_init({/*no_perf=*/true}));
    const auto add = [chain = owner.get()](llama_sampler* sampler) { llama_sampler_chain_add(chain, sampler); };

    if (const auto bias = biases(o, n_vocab, vocab); !bias.empty()) {
        add(llama_sampler_init_logit_bias(n_vocab, static_cast<int32_t>(bias.size()), bias.data()));
    }
    add(llama_sampler_init_penalties(n_vocab, o.penalty_last_n, o.repeat_penalty, o.frequency_penalty,
                                     o.presence_penalty));
    const bool mirostat = o.temperature > 0 && o.mirostat_mode != 0;
    if (o.dry_multiplier > 0 && o.dry_penalty_last_n > 0 && !mirostat) {
        add(new_dry(o, vocab));
    }
    const bool greedy = o.temperature <= 0;
    const auto min_keep = static_cast<size_t>(std::max(1, o.min_keep));
    if (greedy && !o.infill) {
        add(llama_sampler_init_greedy());
    } else if (!greedy && o.mirostat_mode == 1) {
        add(llama_sampler_init_temp(o.temperature));
        add(llama_sampler_init_mirostat(n_vocab, seed, o.mirostat_tau, o.mirostat_eta, mirostat_m));
    } else if (!greedy && o.mirostat_mode == 2) {
        add(llama_sampler_init_temp(o.temperature));
        add(llama_sampler_init_mirostat_v2(seed, o.mirostat_tau, o.mirostat_eta));
    } else {
        if (o.top_n_sigma > 0) {
            add(llama_sampler_init_top_n_sigma(o.top_n_sigma));
        }
        add(llama_sampler_init_top_k(o.top_k));
        add(llama_sampler_init_typical(o.typical_p, min_keep));
        add(llama_sampler_init_top_p(o.top_p, min_keep));
        add(llama_sampler_init_min_p(o.min_p, min_keep));
        if (o.xtc_probability > 0) {
            add(llama_sampler_init_xtc(o.xtc_probability, o.xtc_threshold, min_keep, seed));
        }
        if (o.infill) {
            add(new_infill(o, vocab));
        }
        if (greedy) {
            add(llama_sampler_init_greedy());
        } else {
            add(new_temperature(o));
            add(llama_sampler_init_dist(seed));
        }
    }
    return owner;
}

std::string escaped(const std::string& word) {
    std::string out;
    for (const char c : word) {
        if (std::string_view(".^$|()*+?[]{}\\").find(c) != std::string_view::npos) {
            out += '\\';
        }
        out += c;
    }
    return out;
}

struct Triggers {
    std::vector<std::string> patterns;
    std::vector<llama_token> tokens;
};

// A word that is one special token is that token: comparing ids is all that its wait costs.
void add_word(const std::string& word, const Vocab& vocab, Triggers& out) {
    const std::vector<int32_t> ids = vocab.tokenize(word, false, true);
    const int special = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED;
    if (ids.size() == 1 && (llama_vocab_get_attr(vocab.get(), ids[0]) & special) != 0) {
        out.tokens.push_back(ids[0]);
    } else {
        out.patterns.push_back(escaped(word));
    }
}

Triggers triggers(const SamplerOptions& options, const Vocab& vocab) {
    Triggers out;
    for (const GrammarTrigger& trigger : options.grammar_triggers) {
        switch (trigger.type) {
            case GrammarTrigger::Type::word:
                add_word(trigger.value, vocab, out);
                break;
            case GrammarTrigger::Type::pattern:
                out.patterns.push_back(trigger.value);
                break;
            case GrammarTrigger::Type::pattern_full:
                out.patterns.push_back((trigger.value.starts_with('^') ? "" : "^") + trigger.value +
                                       (trigger.value.ends_with('$') ? "" : "$"));
                break;
            case GrammarTrigger::Type::token:
                out.tokens.push_back(trigger.token);
                break;
        }
    }
    if (out.patterns.empty() && out.tokens.empty()) {
        fail("sampler", "expected at least one of grammar_triggers for grammar_lazy; got none");
    }
    return out;
}

llama_sampler* new_lazy_grammar(const SamplerOptions& options, const Vocab& vocab) {
    const Triggers starts = triggers(options, vocab);
    std::vector<const char*> patterns;
    for (const std::string& pattern : starts.patterns) {
        patterns.push_back(pattern.c_str());
    }
    try {
        return llama_sampler_init_grammar_lazy_patterns(vocab.get(), options.grammar->c_str(),
                                                        options.grammar_root.c_str(), patterns.data(), patterns.size(),
                                                        starts.tokens.data(), starts.tokens.size());
    } catch (const std::exception& error) {  // std::regex
        fail("sampler", "expected regular expressions in grammar_triggers; got ", quoted(error.what()));
    }
}

llama_sampler* new_grammar(const SamplerOptions& options, const Vocab* vocab) {
    if (!options.grammar || options.grammar->empty()) return nullptr;
    if (vocab == nullptr) {
        fail("sampler", "expected a file with a tokenizer for grammar; got none");
    }
    const LibraryErrorCapture capture;
    llama_sampler* const grammar =
        options.grammar_lazy
            ? new_lazy_grammar(options, *vocab)
            : llama_sampler_init_grammar(vocab->get(), options.grammar->c_str(), options.grammar_root.c_str());
    if (grammar == nullptr) {
        fail("sampler", "expected a GBNF grammar with the rule ", quoted(options.grammar_root),
             "; got one that does not parse", capture.first().empty() ? "" : ": ",
             capture.first().empty() ? "" : quoted(capture.first()));
    }
    return grammar;
}

// Tokens of the text in front of the answer, without the space that a tokenizer puts before a text.
std::vector<int32_t> prefix_tokens(const std::string& prefix, const Vocab& vocab) {
    std::vector<int32_t> tokens = vocab.tokenize(prefix, false, true);
    if (!tokens.empty() && !prefix.starts_with(' ') && vocab.token_to_piece(tokens[0], true) == " ") {
        tokens.erase(tokens.begin());
    }
    return tokens;
}

}  // namespace

Sampler::Sampler(const SamplerOptions& options, int32_t n_vocab, const Vocab* vocab)
    : n_vocab_(n_vocab), seed_(chosen_seed(options.seed)) {
    check(options, n_vocab);
    grammar_.reset(new_grammar(options, vocab));
    greedy_ = options.temperature <= 0;
    grammar_first_ = options.mirostat_mode != 0 && options.temperature > 0;
    if (grammar_ && !options.grammar_lazy && !options.grammar_prefix.empty()) {
        prefix_ = prefix_tokens(options.grammar_prefix, *vocab);
        read_prefix();
    }
    chain_ = new_chain(options, n_vocab, seed_, vocab);
    n_top_ = deciding(options, n_vocab, vocab);
}

void Sampler::load(std::span<const float> logits) {
    candidates_.resize(static_cast<size_t>(n_vocab_));
    for (int32_t token = 0; token < n_vocab_; ++token) {
        check_logit(logits[token], token);
        candidates_[token] = {token, logits[token], 0.0f};
    }
}

void Sampler::load_top(std::span<const float> logits) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    constexpr size_t block = block_logits;
    const size_t n_blocks = (logits.size() + block - 1) / block;
    peaks_.assign(2 * n_blocks, -infinity);
    const std::span<float> peaks = std::span(peaks_).first(n_blocks);
    for (size_t b = 0; b < n_blocks; b++) {
        const std::span<const float> part = logits.subspan(b * block, std::min(block, logits.size() - b * block));
        const Peak peak = part.size() == block ? peak_of_block(part.data()) : peak_of(part);
        for (size_t i = 0; !peak.is_finite && i < part.size(); i++) {
            check_logit(part[i], static_cast<int32_t>(b * block + i));
        }
        peaks[b] = peak.value;
    }
    float least = -infinity;  // so many blocks reach it, and so many logits at least
    if (n_blocks > n_top_) {
        const std::span<float> order = std::span(peaks_).last(n_blocks);
        std::ranges::copy(peaks, order.begin());
        const auto at = order.begin() + static_cast<std::ptrdiff_t>(n_top_ - 1);
        std::nth_element(order.begin(), at, order.end(), std::greater<>());
        least = *at;
    }
    candidates_.clear();
    for (size_t b = 0; b < n_blocks; b++) {
        for (size_t at = b * block; peaks[b] >= least && at < std::min((b + 1) * block, logits.size()); at++) {
            if (logits[at] >= least && logits[at] > -infinity) {
                candidates_.push_back({static_cast<int32_t>(at), logits[at], 0.0f});
            }
        }
    }
    const size_t n = std::min(n_top_, candidates_.size());
    std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(n), candidates_.end(),
                      [](const llama_token_data& a, const llama_token_data& b) {
                          return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
                      });
    candidates_.resize(n);
}

int32_t Sampler::choose(bool masked) {
    if (candidates_.empty()) return -1;
    const bool sorted = candidates_.size() < static_cast<size_t>(n_vocab_);
    llama_token_data_array row = {candidates_.data(), candidates_.size(), /*selected=*/-1, sorted};
    try {
        if (masked) {
            llama_sampler_apply(grammar_.get(), &row);
        }
        llama_sampler_apply(chain_.get(), &row);
    } catch (const std::exception& error) {
        fail("sampler", "expected logits for the tokens of the vocabulary; got ", quoted(error.what()));
    }
    n_left_ = row.size;
    const bool possible = row.selected >= 0 && static_cast<size_t>(row.selected) < row.size &&
                          row.data[row.selected].logit > -std::numeric_limits<float>::infinity();
    return possible ? row.data[row.selected].id : -1;
}

int32_t Sampler::sample(std::span<const float> logits) {
    if (logits.size() != static_cast<size_t>(n_vocab_)) {
        fail("sampler", "expected ", n_vocab_, " logits; got ", logits.size());
    }
    if (n_top_ > 0) {
        load_top(logits);
    } else {
        load(logits);
    }
    int32_t token = choose(grammar_ && grammar_first_);
    if (token >= 0 && grammar_ && !grammar_first_ && !grammar_allows(token)) {
        load(logits);
        token = choose(/*masked=*/true);
    }
    if (token < 0) {
        fail("sampler", "expected at least one possible token; got none after ",
             grammar_ ? "the grammar and the biases" : "the biases");
    }
    allowed_ = drawn_ = token;
    return token;
}

std::vector<Sampler::Candidate> Sampler::candidates(size_t n) const {
    if (greedy_) {
        return drawn_ < 0 || n == 0 ? std::vector<Candidate>{} : std::vector<Candidate>{{drawn_, 1.0f}};
    }
    std::vector<Candidate> found;
    for (size_t i = 0; i < n_left_; i++) {
        if (candidates_[i].p > 0.0f) found.push_back({candidates_[i].id, candidates_[i].p});
    }
    const auto end = found.begin() + static_cast<std::ptrdiff_t>(std::min(n, found.size()));
    std::partial_sort(found.begin(), end, found.end(), [](const Candidate& a, const Candidate& b) {
        return a.probability > b.probability || (a.probability == b.probability && a.token < b.token);
    });
    found.erase(end, found.end());
    return found;
}

bool Sampler::grammar_allows(int32_t token) const {
    llama_token_data candidate = {token, 0.0f, 0.0f};
    llama_token_data_array row = {&candidate, 1, -1, false};
    llama_sampler_apply(grammar_.get(), &row);
    return candidate.logit > -std::numeric_limits<float>::infinity();
}

void Sampler::accept_in_grammar(int32_t token) {
    // libllama would abort on an end of generation that the grammar does not allow
    if (token != allowed_ && !grammar_allows(token)) {
        fail("sampler", "expected a token that the grammar allows; got ", token);
    }
    allowed_ = -1;
    try {
        llama_sampler_accept(grammar_.get(), token);
    } catch (const std::exception& error) {  // a trigger in front of text that the grammar does not describe
        fail("sampler", "expected text that the grammar describes; got ", quoted(error.what()));
    }
}

void Sampler::read_prefix() {
    for (const int32_t token : prefix_) {
        accept_in_grammar(token);
    }
}

void Sampler::accept(int32_t token, bool in_grammar) {
    if (token < 0 || token >= n_vocab_) {
        fail("sampler", "expected a token id from 0 to ", n_vocab_ - 1, "; got ", token);
    }
    if (grammar_ && in_grammar) {
        accept_in_grammar(token);
    }
    llama_sampler_accept(chain_.get(), token);
}

void Sampler::reset() {
    allowed_ = -1;
    if (grammar_) {
        llama_sampler_reset(grammar_.get());
        read_prefix();
    }
    llama_sampler_reset(chain_.get());
}

Sampler Sampler::clone() const {
    Sampler copy(n_vocab_, seed_);
    copy.grammar_first_ = grammar_first_;
    copy.greedy_ = greedy_;
    copy.prefix_ = prefix_;
    copy.allowed_ = allowed_;
    if (grammar_) {
        copy.grammar_.reset(llama_sampler_clone(grammar_.get()));
    }
    copy.chain_.reset(llama_sampler_clone(chain_.get()));
    copy.n_top_ = n_top_;
    return copy;
}

}  // namespace lkv
