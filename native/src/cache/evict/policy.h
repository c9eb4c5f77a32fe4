// An eviction policy: how much each query adds to the mass of the tokens that it reads, and which tokens stay whatever their mass is.
//
//   mass(t) = Σ over queries of weight(q) · Σ over heads of softmax((score(q, t) + noise) / temperature(q))     per layer
//
// Scores, visibility and attention sinks are those of ops/latent_attn.h. A sequence without room for its next tokens loses those of the
// least mass, which is averaged over neighbours first.
#pragma once

namespace lkv {

// A query among those of its sequence in one ubatch.
struct QueryPlace {
    int n_behind;   // queries of its sequence that follow it in the ubatch
    int n_decoded;  // earlier tokens of the sequence that were decoded one by one
};

struct QueryWeight {
    float weight;       // 0: it does not count
    float temperature;  // above 0
};

struct EvictPolicy {
    const char* name;
    QueryWeight (*weigh)(const QueryPlace& place);
    int latest_of_100;  // percentage of the kept tokens after the sinks that is reserved for the latest ones
    int most_latest;    // the most tokens that are reserved so; 0: any number
    bool has_noise;     // scores are perturbed (gumbel.h)
    bool prompt_only;   // every ubatch of a prompt starts from no mass; decoded tokens stay
    int pool;           // number of neighbouring tokens that masses are averaged over, odd
};

}  // namespace lkv
