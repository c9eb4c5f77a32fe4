#include "tokens/sampler.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <random>

#include "base/error.h"

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

// Compilers make vectors of so many lanes, and none of fewer.
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
llama_sampler* new_infill(const Vocab* vocab) {
    if (vocab == nullptr || llama_vocab_eos(vocab->get()) < 0) {
        fail("sampler", "expected a vocabulary with an end token for the sampler infill; got one without");
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
            add(new_infill(vocab));
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

}  // namespace

Sampler::Sampler(const SamplerOptions& options, int32_t n_vocab, const Vocab* vocab,
                 std::unique_ptr<TokenMatcher> matcher)
    : n_vocab_(n_vocab), seed_(chosen_seed(options.seed)), matcher_(std::move(matcher)) {
    check(options, n_vocab);
    greedy_ = options.temperature <= 0;
    mask_first_ = options.mirostat_mode != 0 && options.temperature > 0;
    if (options.infill && (matcher_ != nullptr || options.mirostat_mode != 0)) {
        fail("sampler", "expected no ", matcher_ != nullptr ? "grammar" : "mirostat",
             " beside the sampler infill; got both");
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
    is_sorted_ = false;
}

void Sampler::load_allowed(std::span<const float> logits) {
    load(logits);
    matcher_->restrict(candidates_);
    if (n_top_ > 0) {
        keep_top();
    }
}

void Sampler::keep_top() {
    const size_t n = std::min(n_top_, candidates_.size());
    std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(n), candidates_.end(),
                      [](const llama_token_data& a, const llama_token_data& b) {
                          return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
                      });
    candidates_.resize(n);
    is_sorted_ = true;
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
    keep_top();
}

int32_t Sampler::choose() {
    if (candidates_.empty()) return -1;
    llama_token_data_array row = {candidates_.data(), candidates_.size(), /*selected=*/-1, is_sorted_};
    try {
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
    if (matcher_ && mask_first_) {
        load_allowed(logits);
    } else if (n_top_ > 0) {
        load_top(logits);
    } else {
        load(logits);
    }
    int32_t token = choose();
    if (token >= 0 && matcher_ && !mask_first_ && !matcher_->allows(token)) {
        load_allowed(logits);
        token = choose();
    }
    if (token < 0) {
        fail("sampler", "expected at least one possible token; got none after ",
             matcher_ ? "the grammar and the biases" : "the biases");
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

void Sampler::accept(int32_t token, bool in_grammar) {
    if (token < 0 || token >= n_vocab_) {
        fail("sampler", "expected a token id from 0 to ", n_vocab_ - 1, "; got ", token);
    }
    if (matcher_ && in_grammar) {
        if (token != allowed_ && !matcher_->allows(token)) {
            fail("sampler", "expected a token that the grammar allows; got ", token);
        }
        allowed_ = -1;
        matcher_->accept(token);
    }
    llama_sampler_accept(chain_.get(), token);
}

void Sampler::reset() {
    allowed_ = -1;
    if (matcher_) {
        matcher_->reset();
    }
    llama_sampler_reset(chain_.get());
}

Sampler Sampler::clone() const {
    Sampler copy(n_vocab_, seed_);
    copy.greedy_ = greedy_;
    copy.mask_first_ = mask_first_;
    copy.allowed_ = allowed_;
    if (matcher_) {
        copy.matcher_ = matcher_->clone();
    }
    copy.chain_.reset(llama_sampler_clone(chain_.get()));
    copy.n_top_ = n_top_;
    return copy;
}

}  // namespace lkv
