// The policies of eviction. A new one is a header here and one entry in this table.
#pragma once

#include <array>
#include <string_view>

#include "cache/evict/h2o.h"
#include "cache/evict/keyformer.h"
#include "cache/evict/snapkv.h"

namespace lkv {

constexpr std::array evict_policies{&h2o, &keyformer, &snapkv};

// Null: there is none of that name.
constexpr const EvictPolicy* find_policy(std::string_view name) {
    for (const EvictPolicy* policy : evict_policies) {
        if (name == policy->name) return policy;
    }
    return nullptr;
}

}  // namespace lkv
