// Keyformer (Adnan et al. 2024, arXiv 2403.09054, equations 6 to 10): as H2O, with softmax((x + ζ) / τ) in place of softmax(x). ζ is Gumbel
// noise; τ grows by 0.01 with every generated token (tau_delta of the authors' code) from 1 to 2; 30 % of the budget are the latest tokens.
#pragma once

#include <algorithm>

#include "cache/evict/policy.h"

namespace lkv {

constexpr EvictPolicy keyformer{
    .name = "keyformer",
    .weigh =
        [](const QueryPlace& place) {
            return QueryWeight{1.0F, std::min(2.0F, 1.0F + 0.01F * static_cast<float>(place.n_decoded))};
        },
    .latest_of_100 = 30,
    .most_latest = 0,
    .has_noise = true,
    .prompt_only = false,
    .pool = 1,
};

}  // namespace lkv
