#include "tokens/sampler.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <random>

#include "base/error.h"
#include "tokens/sampler_chain.h"

namespace lkv {
namespace {

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

}  // namespace

Sampler::Sampler(const SamplerOptions& options, int32_t n_vocab, const Vocab* vocab,
                 std::unique_ptr<TokenMatcher> matcher)
    : n_vocab_(n_vocab), seed_(chosen_seed(options.seed)), matcher_(std::move(matcher)) {
    check_options(options, n_vocab, matcher_ != nullptr);
    greedy_ = options.temperature <= 0;
    mask_first_ = options.mirostat_mode != 0 && options.temperature > 0;
    chain_ = new_chain(options, n_vocab, seed_, vocab);
    n_top_ = deciding_logits(options, n_vocab, vocab);
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
    const auto is_possible = [](const llama_token_data& each) {
        return each.logit > -std::numeric_limits<float>::infinity();
    };
    if (std::ranges::none_of(candidates_, is_possible)) return -1;  // which llama.cpp's draw asserts
    llama_token_data_array row = {candidates_.data(), candidates_.size(), /*selected=*/-1, is_sorted_};
    try {
        llama_sampler_apply(chain_.get(), &row);
    } catch (const std::exception& error) {
        fail("sampler", "expected logits for the tokens of the vocabulary; got ", quoted(error.what()));
    }
    n_left_ = row.size;
    const bool possible =
        row.selected >= 0 && static_cast<size_t>(row.selected) < row.size && is_possible(row.data[row.selected]);
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
