// What a cache is asked to be.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cache/formats.h"
#include "cache/placement/eviction.h"
#include "cache/placement/options.h"
#include "devices/layer_runs.h"

namespace lkv {

// Rows of a region that keeps every segment. Unless it was asked for by name, its format is never coarser than the one
// chosen for the middle.
struct RegionFormat {
    Format format = Format::f16;
    bool asked_for = false;
};

struct KvCacheOptions : PlacementOptions {
    int n_guesses =
        0;  // the last tokens of a ubatch that recurrent layers can take back one by one, at most most_guesses
    RegionFormat sink_format;
    RegionFormat recent_format;
    std::optional<Format> k_format;  // of stored segments; none given: the file's plan, else f16
    std::optional<Format> v_format;
    std::vector<Format> k_plan;  // a format per segment, all layers and groups in order; empty: the file's plan
    std::vector<Format> v_plan;
    std::vector<LayerRun> runs;  // where layers have their rows; none given: on the host
    EvictOptions evict;
    int kv_read = 0;            // tokens of the middle that a layer reads for a decoded token; 0: all
    bool fixed_window = false;  // recent tokens are as few as the window asks, whatever room there is

    // Under eviction: tokens of the middle that a layer keeps of a sequence.
    int evict_budget() const { return evict.keep - sink - recent; }
};

}  // namespace lkv
