// The KV cache: where tokens are (placement/) and their rows (rows/). Both as bytes: state/.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cache/options.h"
#include "cache/placement/placement.h"
#include "cache/region_view.h"
#include "cache/rows/rows.h"

namespace lkv {

struct RegionBytes {
    std::string name;
    int slots;
    int used;
    size_t k;
    size_t v;
};

struct KvBytes {
    size_t k = 0;
    size_t v = 0;
    size_t cells = 0;  // positions and sequence masks, and under eviction masses
    // A token of the context, cells included: in the middle region, or its share of middle and recent. The ring is shared by all.
    double per_token = 0;
    double f16_per_token = 0;  // full K and V of the same model in f16, in as many slots of every layer; rows only
    std::vector<RegionBytes> regions;
    int n_cells = 0;               // tokens of the context: cells of the middle
    std::vector<int> layer_slots;  // of every layer those of the middle, or of the ring
    std::vector<size_t> runs;      // of k and v what each of KvCacheOptions::runs has
    size_t total() const { return k + v + cells; }
};

class KvCache {
public:
    // Errors: Error when a format does not fit a segment's width. With allocate = false only bytes() may be used (forecast).
    // devices: of every run where its rows live, and who moves them, null = the host; none given: all do there. They outlive the cache.
    KvCache(const HParams& hparams, const CacheSpec& spec, const KvCacheOptions& options, bool allocate = true,
            const std::vector<CacheDevice*>& devices = {});

    const KvCacheOptions& options() const { return options_; }
    const Placement& placement() const { return placement_; }
    Placement& placement() { return placement_; }
    const Rows& rows() const { return rows_; }
    Rows& rows() { return rows_; }
    KvBytes bytes() const;

    // The kernel's view of one layer; stays valid until slots change.
    RegionView view(int region, int layer) const;
    // What a region's slots have gathered in a layer that evicts, [slots]; null where every token stays, as sinks do anyway.
    float* masses(int region, int layer);
    bool has_masses(int region) const { return region == placement_.middle() || region == placement_.recent(); }
    // Where a decoded token's rows go, sinks and a full window aside.
    int entered_region() const { return placement_.recent() >= 0 ? placement_.recent() : placement_.middle(); }
    // After a ubatch: moves what is no longer recent to middle, in every layer (Placement::demote).
    void demote(int n_ahead = 0);

private:
    Placement make_placement(const HParams& hparams);
    void add_eviction(Placement& placement, const std::vector<bool>& in_ring) const;

    KvCacheOptions options_;
    Rows rows_;
    Placement placement_;
    double f16_bytes_ = 0;
};

}  // namespace lkv
