// The latent cache: regions of slots, their rows in every layer, and who holds what. Counts its own bytes.
//
//   region   tokens                            rows
//   sink     the first `sink` of a sequence    full K and V, or every segment of the latents; f16 or another format
//   recent   at least the latest `recent`      likewise
//   middle   all others                        the plan: kept segments, quantized
//
// A token lives in exactly one region. New tokens enter sink or recent (middle when the cache keeps no recent tokens) and
// are demoted from recent to middle in batches. Where a row of the middle is stored in blocks (formats/channel.h), a batch
// is 32 tokens of one sequence, and fewer wait in recent.
//
// Layers with a sliding window have their rows of the middle in the ring: slots for as many tokens as the windows of all
// sequences hold and a ubatch. It is filled anew when tokens have left every sequence's window (ring.cpp). The middle's cells
// still say which tokens there are.
//
// Under eviction the other layers hold a part of the middle's tokens only, each layer its own (evict/eviction.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cache/cells.h"
#include "cache/evict/eviction.h"
#include "cache/region_view.h"
#include "cache/row.h"
#include "cache/spec/cache_spec.h"
#include "cache/storage.h"
#include "devices/layer_runs.h"

namespace lkv {

// What makes latents of full rows, where a token leaves the exact window.
class RowEncoder {
public:
    virtual ~RowEncoder() = default;
    // rows [n, w] of K or V -> z [n, Σ rank]
    virtual void encode(int layer, bool value_side, std::span<const float> rows, int n, std::span<float> z) = 0;
};

// Rows of a region that keeps every segment. Unless it was asked for by name, its format is never coarser than the one
// chosen for the middle.
struct RegionFormat {
    Format format = Format::f16;
    bool asked_for = false;
};

struct KvCacheOptions {
    int n_ctx = 512;  // cells over all sequences
    int n_ubatch = 512;
    int exact_ubatch = 512;  // of a ubatch the most tokens that enter the recent region whole; longer ones come settled
    int n_seq_max = 1;
    int sink = 0;
    int recent = 0;
    double recent_ratio = 0;  // of a sequence behind its sinks: the window is this share or `recent`, whichever is more
    RegionFormat sink_format;
    RegionFormat recent_format;
    std::optional<Format> k_format;  // of stored segments; none given: the file's plan, else f16
    std::optional<Format> v_format;
    std::vector<Format> k_plan;  // a format per segment, all layers and groups in order; empty: the file's plan
    std::vector<Format> v_plan;
    std::vector<LayerRun> runs;  // where layers have their rows; none given: on the host
    EvictOptions evict;

    bool keeps_recent() const { return recent > 0 || recent_ratio > 0; }
    // Under eviction: tokens of the middle that a layer keeps of a sequence.
    int evict_budget() const { return evict.keep - sink - recent; }
    int window(int length) const;  // latest tokens that a sequence of `length` tokens keeps out of the middle region
};

constexpr int slot_tile = 64;  // kernels walk slots in tiles of this many; middle and ring are whole ones
constexpr int64_t whole_tiles(int64_t n) { return (n + slot_tile - 1) / slot_tile * slot_tile; }

constexpr int demotion_batch = 32;  // tokens moved from recent to middle at once: amortises the pass over all layers

struct SlotRef {
    int region;
    int slot;
    int ring = -1;  // its slot in the ring, -1: none
    int arrival =
        -1;  // under eviction: which of the tokens that enter the middle together, where each layer has a slot of its own
};

// A token that leaves recent for the middle.
struct RowMove {
    int from;  // slot
    int to;
    int ring;  // -1: no window reaches it
};

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

class StateWriter;
class StateReader;
struct StateHead;
struct StatePart;
struct SavedRegion;
enum class Accept;

// Sides whose full rows are rotated in a state and not in a cache, or the reverse.
struct RowTurn {
    unsigned sides = 0;     // bit 0: K, bit 1: V
    int block[2] = {1, 1};  // channels that a rotation mixes, a power of two
};

class KvCache {
public:
    // Errors: Error when a format does not fit a segment's width. With allocate = false only bytes() may be used (forecast).
    // devices: of every run where its rows live, and who moves them, null = the host; none given: all do there. They outlive the cache.
    KvCache(const HParams& hparams, const CacheSpec& spec, const KvCacheOptions& options, bool allocate = true,
            const std::vector<CacheDevice*>& devices = {});

    const KvCacheOptions& options() const { return options_; }
    int n_regions() const { return static_cast<int>(regions_.size()); }
    int n_layers() const { return static_cast<int>(in_ring_.size()); }
    int n_used() const;
    int n_occupied()
        const;  // cells that no new token can take: n_used(), and what is left of the middle's broken blocks
    bool in_blocks() const { return regions_.back().cells.block() > 1; }  // K of the middle, in some layer
    KvBytes bytes() const;

    // For demotions on the host; null while none is needed. It outlives the cache.
    void set_encoder(RowEncoder* encoder) { encoder_ = encoder; }

    // Whether a region's rows are full ones in this layer, beside latents in the middle.
    bool is_full(int region, int layer) const {
        return exact_is_full_[static_cast<size_t>(layer)] && region < n_regions() - 1;
    }

    // Whether a layer's rows are the host's.
    bool on_host(int layer) const;

    // Whether a layer's rows of the middle are in the ring.
    bool in_ring(int layer) const { return in_ring_[static_cast<size_t>(layer)]; }
    bool has_ring() const { return ring_.has_value(); }
    const Cells& ring() const { return ring_->cells; }
    // Whether a layer keeps a part of the middle's tokens.
    bool evicts(int layer) const { return eviction_ && eviction_->evicts(layer); }
    const char* policy_name() const;  // of eviction, or none
    const Eviction* eviction() const { return eviction_ ? &*eviction_ : nullptr; }
    // Under eviction: whether tokens of a region gather masses; those of sinks stay anyway.
    bool has_masses(int region) const { return region == n_regions() - 1 || region == region_index("recent"); }
    // What a region's slots have gathered in a layer that evicts, [slots]; null where every token stays.
    float* masses(int region, int layer) {
        if (!has_masses(region)) return nullptr;
        return region == n_regions() - 1 ? eviction_->mass(layer) : eviction_->recent_mass(layer);
    }
    int ring_window() const { return ring_window_; }  // the longest window of a layer in it, 0: none is

    // Where a decoded token's rows go, sinks and a full window aside.
    int entered_region() const {
        const int recent = region_index("recent");
        return recent >= 0 ? recent : n_regions() - 1;
    }
    // The kernel's view of one layer; stays valid until slots change.
    RegionView view(int region, int layer) const;
    uint8_t* k_row(int region, int layer, int slot);
    uint8_t* v_row(int region, int layer, int slot);
    const RowLayout& k_layout(int region, int layer) const;
    const RowLayout& v_layout(int region, int layer) const;
    const Cells& cells(int region) const { return regions_[static_cast<size_t>(region)].cells; }
    const Cells& cells(int region, int layer) const {
        return region == n_regions() - 1 && evicts(layer) ? eviction_->cells(layer) : region_of(region, layer).cells;
    }
    // Region and slot of a token's row of this layer; slot -1: nowhere, no query of the layer sees it again.
    SlotRef row_of(const SlotRef& at, int layer) const {
        const int middle = n_regions() - 1;
        if (evicts(layer) && at.region == middle)
            return {middle, eviction_->slot(layer, static_cast<size_t>(at.arrival))};
        if (!in_ring(layer) || at.region != middle) return {at.region, at.slot};
        return {middle, at.ring};
    }

    // Of moves those that have a row in this layer, to where it is there.
    std::vector<RowMove> moves_of(int layer, std::span<const RowMove> moved) const;

    // Slots for new tokens (positions must be new in their sequence). Errors: Error when fewer than pos.size() cells are free,
    // in recent where the middle takes blocks only. At most n_ubatch of them, where there is a ring.
    std::vector<SlotRef> claim(std::span<const int32_t> pos, std::span<const int32_t> seq);
    // The same for whole sequences that are not in the cache yet: every token goes where it is when the last has come. Tokens
    // that go to a block lie in it in the order of their positions.
    std::vector<SlotRef> claim_settled(std::span<const int32_t> pos, std::span<const int32_t> seq);
    void release(SlotRef at) {
        regions_[static_cast<size_t>(at.region)].cells.release(at.slot);
        if (at.ring >= 0) ring_->cells.release(at.ring);
        if (at.arrival >= 0) eviction_->release(static_cast<size_t>(at.arrival));
        cells_version_++;
    }
    // Changes whenever slots change hands other than by claim() of free ones: a copy of the cells is stale then.
    uint64_t cells_version() const { return cells_version_; }
    // After a ubatch: moves what is no longer recent to middle, in every layer. n_ahead: so many of the latest tokens may be taken
    // back, and push nothing out.
    void demote(int n_ahead = 0);

    // llama.cpp's sequence verbs; p0/p1 half-open, negative = open. False, and nothing has changed: a sequence's next token would
    // see tokens in its window whose rows have left the ring; or, under eviction, a part of a sequence would go, move or be lent,
    // while what was evicted had been chosen with all of it.
    void clear();
    [[nodiscard]] bool seq_rm(int seq, int32_t p0, int32_t p1);
    [[nodiscard]] bool seq_cp(int src, int dst, int32_t p0, int32_t p1);
    void seq_keep(int seq);
    // Not under eviction.
    [[nodiscard]] bool seq_add(int seq, int32_t p0, int32_t p1, int32_t delta);
    int32_t seq_pos_min(int seq) const;  // -1 when empty
    int32_t seq_pos_max(int seq) const;

    // Everything that a restore needs, rows in use only: of all sequences, or of one. Errors on read: Error when the layout
    // differs.
    std::vector<uint8_t> save() const;
    std::vector<uint8_t> save_sequence(int seq) const;
    // In parts: the tokens between each two of these positions, and from the last on. Not under eviction, but for the whole.
    std::vector<std::vector<uint8_t>> save_sequence(int seq, std::span<const int32_t> cuts) const;
    // The position before which rows of the sequence stay as they are, whatever follows: parts of it are those of any sequence that
    // begins with the same tokens. Under eviction 0.
    int32_t settled(int seq) const;
    // In place of all that is in the cache. What was lost on the way, in words: "" where nothing was. accept: which rows of others
    // are coded anew.
    std::string restore(std::span<const uint8_t> state, Accept accept, const RowTurn& turned = {});
    // Of a state of one sequence, in place of what `seq` has, in any slots that are free. Errors: as above, or no room; the
    // sequence is empty then.
    std::string restore_sequence(int seq, std::span<const std::span<const uint8_t>> parts, Accept accept,
                                 const RowTurn& turned = {});

private:
    class Transcoder;
    struct Layer {
        RowPlan k_plan;
        RowPlan v_plan;
        RowLayout k{};  // of k_plan
        RowLayout v{};
        bool held = true;     // whether the region has rows of it
        size_t k_offset = 0;  // of slot 0 in the region's storage
        size_t v_offset = 0;
    };
    struct Region {
        std::string name;
        Cells cells;
        int n_slots;  // of rows: those of the cells, fewer under eviction
        std::vector<Layer> layers;
        std::unique_ptr<CacheStorage> storage;
        size_t k_bytes = 0;
        size_t v_bytes = 0;
        bool is_part = false;  // under eviction: rows are those of the layers' own cells
        // Whether each of the region's own cells has a row in this layer.
        bool has_row(const Layer& layer) const { return layer.held && !is_part; }
        // Rows lie layer by layer.
        size_t bytes_before(int layer) const {
            return static_cast<size_t>(layer) < layers.size() ? layers[static_cast<size_t>(layer)].k_offset
                                                              : k_bytes + v_bytes;
        }
        size_t bytes_of(const LayerRun& run) const {
            return bytes_before(run.end_layer) - bytes_before(run.first_layer);
        }
    };

    // What is no longer recent, once a sequence has a batch more than its window: slots of which every sequence that holds
    // them has a whole window of newer tokens.
    std::vector<int> old_slots(int n_ahead) const;
    // K or V of these recent slots as the middle stores it, before any format: [slots, width].
    std::vector<float> middle_values(int layer, bool value_side, std::span<const int> slots);
    // Full rows of K or V into single rows of the middle.
    void encode_rows(int layer, bool value_side, std::span<const RowMove> moved);
    // Both claim places of the middle for recent slots.
    std::vector<RowMove> claim_moves(std::span<const int> old);
    std::vector<RowMove> claim_blocks(std::span<const int> old);
    // Rows of recent slots there, in every layer.
    void move_to_middle(std::span<const RowMove> moved);
    void move_to_blocks(int layer, std::span<const RowMove> moved);
    // Under eviction: new tokens take their slots of the middle in every layer.
    void settle(std::span<const SlotRef> slots, std::span<const Arrival> arrivals);
    // Gives back what a claim has taken so far.
    [[noreturn]] void refuse_recent(std::span<const SlotRef> claimed, size_t wanted);

    uint64_t sequences_of(uint64_t mask) const;  // those of the mask that have tokens
    struct Positions {
        int32_t first = 0;
        int32_t end = INT32_MAX;
        bool have(int32_t pos) const { return pos >= first && pos < end; }
    };
    static std::vector<int> slots_of(const Region& region, uint64_t mask, const Positions& positions);
    // rows: slot 0 of the region's first tensor
    static void save(const Region& region, const uint8_t* rows, uint64_t mask, const Positions& positions,
                     std::span<const int> slots, StateWriter& out);
    std::vector<std::vector<uint8_t>> save(uint64_t mask, std::span<const Positions> parts) const;
    void save_ring(uint64_t mask, std::span<const Positions> parts, std::span<StateWriter> out) const;
    StateHead read_header(StateReader& in, int to_seq) const;
    std::vector<SavedRegion> read_regions(StateReader& in, uint32_t n_regions) const;
    bool check_accepted(std::span<const SavedRegion> saved, Accept accept, const RowTurn& turned) const;
    bool fits_in_place(std::span<const SavedRegion> saved, int to_seq) const;
    void restore(Region& region, const SavedRegion& saved, uint64_t sequences, int to_seq, uint8_t* rows);
    std::string restore_parts(std::span<StatePart> parts, int to_seq, Accept accept, const RowTurn& turned);
    std::vector<const Region*> all_regions() const;  // the ring last
    // Under eviction: what each layer has of the middle, and the masses of recent tokens.
    void save_kept(uint64_t mask, StateWriter& out) const;
    bool restore_kept(StateReader& in, int to_seq, Accept accept);
    void restore_recent_masses(StateReader& in, int to_seq, std::span<const int> layers);
    void release_sequence(int seq);

    // The ring (ring.cpp). Which layers are in it, of so many slots; 0: none is.
    int choose_ring(const HParams& hparams);
    bool enters_ring(int region) const { return ring_ && region == n_regions() - 1; }
    // Of a batch that settles, how many of each sequence's latest tokens go to the ring.
    int ring_share(size_t n_tokens) const;
    std::vector<int32_t> next_positions() const;  // [max_sequences] one past a sequence's latest token
    // Whether some sequence that holds the token will see it again in a window.
    bool is_seen_again(int32_t pos, uint64_t seq_mask, std::span<const int32_t> next) const;
    // Gives slots back whose tokens no query will see again, those first that left their window first. Errors: Error when fewer
    // than n are free then.
    void make_ring_room(int n);
    bool ring_is_complete() const;  // of every sequence, what its next token sees
    // Runs a verb; false, and all cells are as before: what it leaves is not complete.
    template <typename F>
    bool keeps_windows(F&& verb);

    // `format`: of every segment; none given: the middle's plan. holds(layer): whether its rows are there.
    template <typename F>
    Region make_region(const HParams& hparams, const CacheSpec& spec, std::string name, int n_slots,
                       std::optional<RegionFormat> format, F&& holds) const;
    void check_blocks() const;  // Error where there may be none
    void check_eviction() const;
    void add_eviction(const HParams& hparams);
    bool takes_part(int seq, int32_t p0, int32_t p1) const;  // some tokens of a sequence, and not all
    void check_ring_formats() const;
    void add_middle(const HParams& hparams, const CacheSpec& spec);  // and the ring
    void allocate_regions();
    const Region& region_of(int region, int layer) const {
        return region == n_regions() - 1 && in_ring(layer) ? *ring_ : regions_[static_cast<size_t>(region)];
    }
    int region_index(const char* name) const;  // -1 = absent
    void check_room(size_t n) const;
    template <typename F>
    void each_slot(F&& visit);  // of the ring too
    template <typename F>
    void each_slot(F&& visit) const {  // of the regions: every token once
        for (const Region& region : regions_) {
            for (int slot = 0; slot < region.cells.end(); slot++) {
                if (region.cells.used(slot)) {
                    visit(region.cells, slot);
                }
            }
        }
    }

    KvCacheOptions options_;
    std::vector<CacheDevice*> devices_;
    RowEncoder* encoder_ = nullptr;
    std::vector<bool> exact_is_full_;    // of every layer
    std::vector<bool> is_full_path_[2];  // likewise, of K and V: full rows in every region
    RowPlan whole_;                      // a layout with the groups of full rows
    uint64_t cells_version_ = 0;
    std::vector<Region> regions_;
    std::optional<Region> ring_;
    std::optional<Eviction> eviction_;
    std::vector<bool> in_ring_;  // of every layer
    int ring_window_ = 0;
    double f16_bytes_ = 0;
};

}  // namespace lkv
