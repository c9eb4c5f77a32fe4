// What a policy of eviction is: how queries count in the mass that a token gathers, and which tokens stay whatever theirs is.
//
//   mass(t) = Σ over queries of weight(q) · Σ over heads of softmax((score(q, t) + noise) / temperature(q))     per layer
//
// Scores, visibility and attention sinks are those of ops/latent_attn.h. A sequence that has no room for its next tokens gives up those of
// the least mass, pooled over their neighbours.
#pragma once

namespace lkv {

// A query among those of its sequence in one ubatch.
struct QueryPlace {
    int n_behind;   // queries of its sequence that follow it in the ubatch
    int n_decoded;  // tokens of the sequence that came one by one before it
};

struct QueryWeight {
    float weight;       // 0: it does not count
    float temperature;  // above 0
};

struct EvictPolicy {
    const char* name;
    QueryWeight (*weigh)(const QueryPlace& place);
    int latest_of_100;  // of the tokens that a layer keeps behind the sinks so many percent, the latest, stay
    int most_latest;    // and no more tokens than that; 0: any number
    bool has_noise;     // scores are perturbed (gumbel.h)
    bool prompt_only;   // each part of a prompt starts from no mass; tokens that come one by one stay
    int pool;           // masses are averaged over so many tokens around each, an odd number
};

}  // namespace lkv
