// The cache: where tokens are (placement/), their rows (rows/), and the states of recurrent layers (recurrent/). All as bytes: state/.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cache/options.h"
#include "cache/placement/placement.h"
#include "cache/recurrent/sequence_state.h"
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
    size_t cells = 0;      // positions and sequence masks; under eviction masses, and with kv_read means to choose by
    size_t states = 0;     // of recurrent layers, on their devices
    size_t snapshots = 0;  // copies of states in the host's memory that exist now
    size_t snapshots_most = 0;
    // A token of the context, cells included: in the middle region, or its share of middle and recent. The ring is shared by all.
    double per_token = 0;
    double f16_per_token = 0;  // full K and V of the same model in f16, in as many slots of every layer; rows only
    size_t f16_total = 0;      // of the whole context, cells included
    double share = 0;          // of f16's bytes, per token: per_token of f16_total / n_cells
    std::vector<RegionBytes> regions;
    int n_cells = 0;  // tokens of the context: cells of the middle
    // A single sequence has all of its tokens exact up to all_exact, and so many at a quarter, a half and all of the context.
    int all_exact = 0;
    int exact_at[3] = {};
    std::vector<int> layer_slots;  // slots of each layer's middle, or of its ring
    std::vector<size_t> runs;      // bytes of k, v and states of each of KvCacheOptions::runs
    size_t total() const { return k + v + cells + states + snapshots; }
};

class KvCache {
public:
    // Errors: Error when a format does not fit a segment's width. With allocate = false only bytes() may be used (forecast).
    // devices: for each run, where its rows live and who moves them; null = the host. None given: all on the host. They outlive the cache.
    KvCache(const HParams& hparams, const CacheSpec& spec, const KvCacheOptions& options, bool allocate = true,
            const std::vector<CacheDevice*>& devices = {});

    const KvCacheOptions& options() const { return options_; }
    const Placement& placement() const { return placement_; }
    Placement& placement() { return placement_; }
    const Rows& rows() const { return rows_; }
    Rows& rows() { return rows_; }
    const SequenceState& states() const { return states_; }
    SequenceState& states() { return states_; }
    KvBytes bytes() const;

    // The verbs of Placement, of rows and states together. Where layers are recurrent, a part of a sequence can only go or be copied so
    // that a snapshot remains of what stays: remove() returns false otherwise, and copy() says so. Nothing moves there.
    [[nodiscard]] bool remove(int seq, const Positions& positions = {});  // seq < 0: every sequence
    void copy(int src, int dst, const Positions& positions);
    void shift(int seq, const Positions& positions, int32_t delta);
    void keep(int seq);
    void clear();
    void remove_whole(int seq);
    // The largest number of first positions, at most `limit`, that remove() can leave of a sequence.
    int32_t resumable(int seq, int32_t limit) const;

    // The kernel's view of one layer; stays valid until slots change.
    RegionView view(int region, int layer) const {
        const Cells& held = placement_.cells(region, layer);
        const bool has_rows = rows_.region(region, layer).layers[static_cast<size_t>(layer)].held;
        const bool of_value = rows_.key_of_value(layer);
        return {rows_.row(region, layer, of_value, 0),
                rows_.v_row(region, layer, 0),
                rows_.page(region, layer, of_value),
                rows_.page(region, layer, true),
                held.pos_data(),
                held.seq_data(),
                has_rows ? held.end() : 0,
                rows_.layout(region, layer, of_value),
                rows_.values_layout(region, layer)};
    }
    // What a region's slots have gathered in a layer that evicts, [slots]; null where every token stays, as sinks do anyway.
    float* masses(int region, int layer) {
        if (!has_masses(region)) return nullptr;
        Eviction& eviction = *placement_.eviction();
        return region == placement_.middle() ? eviction.mass(layer) : eviction.recent_mass(layer);
    }
    bool has_masses(int region) const { return region == placement_.middle() || region == placement_.recent(); }
    // Where a decoded token's rows go, sinks and a full window aside.
    int entered_region() const { return placement_.recent() >= 0 ? placement_.recent() : placement_.middle(); }
    // Placement::claim() in a middle that has room for it: what is left of broken token blocks is brought together, and their scales chosen
    // anew, only where a context that fits would find none otherwise.
    std::vector<SlotRef> claim(const NewTokens& tokens);
    // Brings broken blocks together until so many are free, or no more can be.
    void free_blocks(int n);
    // After a ubatch: moves what is no longer recent to middle, in every layer (Placement::demote).
    void demote(const Guesses& guesses = {}) {
        if (placement_.has_tiers()) {
            make_exact_room(placement_.spare(), 0, guesses);
        } else if (placement_.recent() >= 0) {
            demote(placement_.due(guesses));
        }
    }
    // Where exact and compressed rows share memory: demotes until n_exact new tokens are exact and n_settling find room in the middle, as far
    // as windows allow that.
    void make_exact_room(int n_exact, int n_settling, const Guesses& guesses = {});

private:
    bool demote(const Placement::Leaving& leaving);  // false: nothing has left
    void gather_exact(int n_settling);
    Placement make_placement(const HParams& hparams);
    bool can_end_at(int seq, const Positions& removed, int32_t& end) const;
    void add_eviction(Placement& placement, const std::vector<bool>& in_ring) const;

    KvCacheOptions options_;
    Rows rows_;
    Placement placement_;
    SequenceState states_;
    std::vector<size_t> state_bytes_;  // of a slot, in each of KvCacheOptions::runs
    double f16_bytes_ = 0;
};

}  // namespace lkv
