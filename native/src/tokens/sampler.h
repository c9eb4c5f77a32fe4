// Picks a token from one row of logits: libllama's samplers in llama.cpp's default order.
//
//   logit bias · penalties · DRY · top-n-sigma · top-k · typical · top-p · min-p · XTC · infill · temperature · draw · grammar
//   mirostat replaces everything from DRY on but the temperature; temperature <= 0 takes the largest logit instead
//
// What the answer has to match sees the drawn token first. One that it refuses is drawn again from the tokens that it allows: a
// model that keeps to it pays for one token, not for the vocabulary. Mirostat, which learns from what it draws, is masked first.
//
// Where nothing before top-k changes a logit or asks for all of them, the chain gets the k largest, found in one pass, and not
// the vocabulary: of 49152 logits 10 us in place of 95.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "llama.h"
#include "tokens/token_matcher.h"
#include "tokens/vocab.h"

namespace lkv {

struct FreeSampler {
    void operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }
};
using SamplerHandle = std::unique_ptr<llama_sampler, FreeSampler>;

struct SamplerOptions {
    static constexpr uint32_t random_seed = LLAMA_DEFAULT_SEED;  // 0xFFFFFFFF

    float temperature = 0.8f;  // <= 0: greedy
    int32_t top_k = 40;        // <= 0: off
    float top_p = 0.95f;       // 1: off
    float min_p = 0.05f;       // 0: off
    float typical_p = 1.0f;    // 1: off
    float repeat_penalty = 1.0f;
    float frequency_penalty = 0.0f;
    float presence_penalty = 0.0f;
    int32_t penalty_last_n = 64;  // tokens that the penalties look back on; 0: off
    int32_t mirostat_mode = 0;    // 0: off, 1, 2
    float mirostat_tau = 5.0f;
    float mirostat_eta = 0.1f;
    float top_n_sigma = -1.0f;     // keeps logits within so many standard deviations of the largest; <= 0: off
    float xtc_probability = 0.0f;  // of removing the likeliest tokens; 0: off
    float xtc_threshold = 0.1f;    // those above it, but for the least of them; > 0.5: off
    float dynatemp_range = 0.0f;   // the temperature moves by so much with the entropy; 0: off
    float dynatemp_exponent = 1.0f;
    float dry_multiplier = 0.0f;  // DRY: penalty multiplier · base^(length - allowed_length) on what repeats; 0: off
    float dry_base = 1.75f;
    int32_t dry_allowed_length = 2;
    int32_t dry_penalty_last_n = 0;  // tokens that DRY looks back on; 0: off
    std::vector<std::string> dry_sequence_breakers = {"\n", ":", "\"", "*"};
    int32_t min_keep = 0;  // tokens that typical, top-p, min-p and XTC leave at least
    bool infill = false;   // ends a filled gap where the text that follows is likely (llama.cpp's sampler of that name)
    uint32_t seed = random_seed;
    std::map<int32_t, float> logit_bias;  // added to the logit; -inf bans the token
};

class Sampler {
public:
    // n_vocab: length of a row of logits. vocab: needed by DRY only; outlives the sampler. matcher: null where any text will do.
    // Errors: Error `[sampler] …` for an option out of range.
    Sampler(const SamplerOptions& options, int32_t n_vocab, const Vocab* vocab,
            std::unique_ptr<TokenMatcher> matcher = nullptr);

    // logits [n_vocab], natural log units. The state of penalties and grammar moves in accept(), not here.
    // Errors: a row of another length, with NaN or +inf, or where no token is possible.
    int32_t sample(std::span<const float> logits);

    // The n likeliest tokens that the last sample() drew from, after all samplers, likeliest first; those that were not
    // possible are left out. Greedy: the one, of probability 1.
    struct Candidate {
        int32_t token;
        float probability;
    };
    std::vector<Candidate> candidates(size_t n) const;

    // Tells penalties and grammar that the token is part of the text. in_grammar: false for the tokens of a prompt,
    // which the grammar does not describe. Errors: a token that the grammar does not allow here.
    void accept(int32_t token, bool in_grammar = true);

    // Back to the state after construction, random numbers included.
    void reset();

    // Another sampler in the same state.
    Sampler clone() const;

    uint32_t seed() const { return seed_; }  // the one in use; never random_seed

private:
    Sampler(int32_t n_vocab, uint32_t seed) : n_vocab_(n_vocab), seed_(seed) {}

    void load(std::span<const float> logits);
    void load_allowed(std::span<const float> logits);
    void load_top(
        std::span<const float> logits);  // the n_top_ largest, largest first; equal ones in the order of their ids
    void keep_top();
    int32_t choose();  // the chain's choice among the candidates, -1 where none is possible

    int32_t n_vocab_;
    uint32_t seed_;
    bool mask_first_ = false;                // mask, then draw
    std::unique_ptr<TokenMatcher> matcher_;  // null: anything goes
    int32_t allowed_ = -1;                   // a token that the matcher has allowed at its present state
    SamplerHandle chain_;
    size_t n_top_ = 0;  // so many of the largest logits are all that the chain looks at; 0: at all
    std::vector<llama_token_data> candidates_;  // at most n_vocab, reused
    size_t n_left_ = 0;                         // of them, after the chain
    int32_t drawn_ = -1;                        // by the last sample()
    bool greedy_ = false;
    bool is_sorted_ = false;    // the candidates
    std::vector<float> peaks_;  // of blocks of logits, reused
};

}  // namespace lkv
