// How many tokens a cache is for, and which of them stay exact.
#pragma once

#include <algorithm>
#include <cmath>

#include "cache/ubatches.h"

namespace lkv {

struct PlacementOptions {
    int n_ctx = 512;  // cells over all sequences
    Ubatches ubatches;
    int n_seq_max = 1;
    int sink = 0;
    int recent = 0;
    double recent_ratio = 0;  // of a sequence after its sinks: the window is this share or `recent`, whichever is more

    bool keeps_recent() const { return recent > 0 || recent_ratio > 0; }
    // Latest tokens that a sequence of `length` tokens keeps out of the middle region.
    int window(int length) const {
        // files hold the ratio in f32: 0.1 of 100 tokens are 10, not 11
        return std::max(recent, static_cast<int>(std::ceil((recent_ratio - 1e-7) * std::max(0, length - sink))));
    }
};

constexpr int demotion_batch = 32;  // tokens moved from recent to middle at once: amortises the pass over all layers

}  // namespace lkv
