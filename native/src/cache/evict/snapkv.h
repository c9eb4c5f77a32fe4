// SnapKV (Li et al. 2024, arXiv 2404.14469, listing 1): the last 32 queries of a prompt choose, by masses averaged over 5 neighbours; these 32
// tokens and what is generated stay. Of a prompt in several ubatches each makes room by the masses of the one before.
#pragma once

#include "cache/evict/policy.h"

namespace lkv {

constexpr int snapkv_window = 32;

constexpr EvictPolicy snapkv{
    .name = "snapkv",
    .weigh = [](const QueryPlace& place) { return QueryWeight{place.n_behind < snapkv_window ? 1.0F : 0.0F, 1.0F}; },
    .latest_of_100 = 50,
    .most_latest = snapkv_window,
    .has_noise = false,
    .prompt_only = true,
    .pool = 5,
};

}  // namespace lkv
