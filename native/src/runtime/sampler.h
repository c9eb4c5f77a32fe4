// Picks a token from one row of logits: libllama's samplers in llama.cpp's default order.
//
//   grammar · logit bias · penalties · top-k · typical · top-p · min-p · temperature · draw
//   mirostat replaces everything from top-k on but the temperature; temperature <= 0 takes the largest logit instead
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llama.h"
#include "runtime/vocab.h"

namespace lkv {

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
    uint32_t seed = random_seed;
    std::map<int32_t, float> logit_bias;  // added to the logit; -inf bans the token
    std::optional<std::string> grammar;   // GBNF
    std::string grammar_root = "root";
};

class Sampler {
public:
    // n_vocab: length of a row of logits. vocab: needed by a grammar only; outlives the sampler.
    // Errors: Error `[sampler] …` for an option out of range, a grammar that does not parse or has no vocabulary.
    Sampler(const SamplerOptions& options, int32_t n_vocab, const Vocab* vocab);

    // logits [n_vocab], natural log units. The state of penalties and grammar moves in accept(), not here.
    // Errors: a row of another length, with NaN or +inf, or where no token is possible.
    int32_t sample(std::span<const float> logits);

    // Tells penalties and grammar that the token is part of the text. in_grammar: false for the tokens of a prompt,
    // which the grammar does not describe. Errors: a token that the grammar does not allow here.
    void accept(int32_t token, bool in_grammar = true);

    // Back to the state after construction, random numbers included.
    void reset();

    uint32_t seed() const { return seed_; }  // the one in use; never random_seed

private:
    struct Release {
        void operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }
    };
    using Handle = std::unique_ptr<llama_sampler, Release>;

    bool grammar_allows(int32_t token) const;

    int32_t n_vocab_;
    uint32_t seed_;
    Handle grammar_;  // null: none
    Handle chain_;
    std::vector<llama_token_data> candidates_;  // [n_vocab], reused
};

}  // namespace lkv
