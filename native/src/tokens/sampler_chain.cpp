#include "tokens/sampler_chain.h"

#include <algorithm>
#include <cmath>
#include <limits>

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

}  // namespace

void check_options(const SamplerOptions& o, int32_t n_vocab, bool has_grammar) {
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
    if (o.infill && (has_grammar || o.mirostat_mode != 0)) {
        fail("sampler", "expected no ", has_grammar ? "grammar" : "mirostat", " beside the sampler infill; got both");
    }
}

size_t deciding_logits(const SamplerOptions& o, int32_t n_vocab, const Vocab* vocab) {
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

}  // namespace lkv
