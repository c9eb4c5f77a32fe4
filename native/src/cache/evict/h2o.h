// H2O (Zhang et al. 2023, arXiv 2306.14048, algorithm 1): all queries count; half of the budget is for the heavy hitters,
// half for the latest tokens. Here a layer's KV heads evict together, as they may share a latent.
#pragma once

#include "cache/evict/policy.h"

namespace lkv {

constexpr EvictPolicy h2o{
    .name = "h2o",
    .weigh = [](const QueryPlace&) { return QueryWeight{1.0F, 1.0F}; },
    .latest_of_100 = 50,
    .most_latest = 0,
    .has_noise = false,
    .prompt_only = false,
    .pool = 1,
};

}  // namespace lkv
