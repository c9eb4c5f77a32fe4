// The rows of every region and layer: how each is laid out, where it lies, how many bytes it has. Knows slots, and nothing of tokens.
//
//   region   rows
//   sink     full K and V, or every segment of the latents; f16 or another format
//   recent   likewise
//   middle   the plan: kept segments, quantized
//   ring     as the middle, of the layers whose sliding window is all that they keep
#pragma once

#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cache/options.h"
#include "cache/placement/arena.h"
#include "cache/placement/selection.h"
#include "cache/row.h"
#include "cache/spec/cache_spec.h"
#include "cache/storage.h"

namespace lkv {

// What makes latents of full rows, where a token leaves the exact window.
class RowEncoder {
public:
    virtual ~RowEncoder() = default;
    // rows [n, w] of K or V -> z [n, Σ rank]
    virtual void encode(int layer, bool value_side, std::span<const float> rows, int n, std::span<float> z) = 0;
};

struct LayerRows {
    RowPlan plan[2];                        // of K and V
    RowLayout layout[2];                    // of plan
    std::vector<GroupLayout> value_groups;  // of MLA: V's, without what is the key's alone
    bool held = true;                       // whether the region has rows of it
    size_t offset[2] = {0, 0};              // of slot 0 in the region's storage
    int64_t page[2] = {0, 0};               // from a page of slots to the next one there
    size_t bytes = 0;                       // of all slots

    size_t at(int side, int slot) const {
        return offset[side] + static_cast<size_t>(row_offset(slot, page[side], layout[side].row_bytes));
    }
};

struct RegionRows {
    std::string name;
    int n_slots = 0;
    bool is_selected = false;  // each layer has tokens of its own choice in them
    std::vector<LayerRows> layers;
    std::shared_ptr<CacheStorage> storage;  // recent and middle may have one between them
    size_t storage_bytes = 0;
    size_t bytes[2] = {0, 0};  // of K and V

    // Whether every token of the region has a row in this layer.
    bool has_row(const LayerRows& layer) const { return layer.held && !is_selected; }
    size_t total_bytes() const { return bytes[0] + bytes[1]; }
    // Where these slots' rows lie, in all layers or in one. gap: so many slots between them are taken too; many short copies would be slower.
    std::vector<ByteRange> ranges_of(std::vector<int> slots, int gap) const;
    static void add_ranges(const LayerRows& layer, std::vector<int> slots, int gap, std::vector<ByteRange>& to);
    std::vector<ByteRange> whole() const { return {{0, storage_bytes}}; }
    size_t bytes_of(const LayerRun& run) const {
        size_t bytes = 0;
        for (int il = run.first_layer; il < run.end_layer; il++) bytes += layers[static_cast<size_t>(il)].bytes;
        return bytes;
    }
    HostBytes host_bytes() const { return {*storage, storage_bytes}; }
};

class Rows {
public:
    // devices: of every run where its rows live, and who moves them, null = the host; none given: all do there. They outlive this.
    Rows(const HParams& hparams, const CacheSpec& spec, const KvCacheOptions& options,
         const std::vector<CacheDevice*>& devices);

    // Whether a layer's rows of the middle are in the ring instead. Before any region.
    void set_ring(const std::vector<bool>& in_ring) { in_ring_ = in_ring; }
    // Regions, in their order. Errors: Error when a format does not fit a segment's width.
    void add_exact(const std::string& name, int n_slots, const RegionFormat& format);
    // n_ring: slots of the ring, 0: there is none.
    void add_middle(int n_slots, bool is_selected, int n_ring);
    // Recent and middle in one memory of as many bytes, once both are there. Before allocate().
    Arena share_memory(int least_exact);
    void allocate();
    // For demotions on the host; null while none is needed. It outlives this.
    void set_encoder(RowEncoder* encoder) { encoder_ = encoder; }
    RowEncoder* encoder() const { return encoder_; }

    const CacheSpec& spec() const { return spec_; }
    // Bytes that cells of more exact tokens take of the memory that recent and middle share.
    size_t bytes_for_cells() const { return std::accumulate(for_cells_.begin(), for_cells_.end(), size_t{0}); }
    int n_layers() const { return static_cast<int>(spec_.layers.size()); }
    int middle() const { return middle_; }
    int recent() const { return recent_; }
    bool takes_token_blocks() const;  // whether K of the middle lies in token blocks, in some layer
    bool has_rows(int layer) const { return layer_spec(layer).has_rows(); }
    bool has_side(int layer, bool value_side) const {
        return has_rows(layer) && (value_side || !layer_spec(layer).key_of_value());
    }
    // Whether keys are made of the rows of V.
    bool key_of_value(int layer) const { return layer_spec(layer).key_of_value(); }
    // Whether rows of the exact windows are full ones in this layer, beside latents in the middle.
    bool exact_is_full(int layer) const { return layer_spec(layer).exact_is_full(); }
    bool is_full(int region, int layer) const { return region < middle_ && exact_is_full(layer); }
    bool is_full_path(int layer, bool value_side) const {  // full rows in every region
        return value_side ? layer_spec(layer).v_path == VPath::full : layer_spec(layer).k_path == KPath::full;
    }
    bool on_host(int layer) const {  // whether a layer's rows are the host's
        for (size_t i = 0; i < devices_.size(); i++) {
            if (layer < options_.runs[i].end_layer) return devices_[i] == nullptr;
        }
        return true;
    }
    const std::vector<CacheDevice*>& devices() const { return devices_; }

    std::span<const RegionRows> regions() const { return regions_; }  // the ring last
    const RegionRows& region(int region, int layer) const {
        return regions_[static_cast<size_t>(region == middle_ && in_ring_[static_cast<size_t>(layer)] ? ring_
                                                                                                      : region)];
    }
    const RowLayout& layout(int region, int layer, bool value_side) const {
        return regions_[static_cast<size_t>(region)].layers[static_cast<size_t>(layer)].layout[value_side ? 1 : 0];
    }
    const RowLayout& k_layout(int region, int layer) const { return layout(region, layer, false); }
    const RowLayout& v_layout(int region, int layer) const { return layout(region, layer, true); }
    // V's rows as attention reads values from them: with MLA without the channels of the key alone.
    RowLayout values_layout(int region, int layer) const;
    bool is_mla(int layer) const { return layer_spec(layer).is_mla(); }
    uint8_t* row(int region, int layer, bool value_side, int slot) const {  // null in a forecast
        const RegionRows& held = this->region(region, layer);
        const LayerRows& rows = held.layers[static_cast<size_t>(layer)];
        const size_t side = value_side ? 1 : 0;
        if (held.storage == nullptr) return nullptr;
        return held.storage->at(rows.offset[side]) + row_offset(slot, rows.page[side], rows.layout[side].row_bytes);
    }
    int64_t page(int region, int layer, bool value_side) const {
        return this->region(region, layer).layers[static_cast<size_t>(layer)].page[value_side ? 1 : 0];
    }
    uint8_t* k_row(int region, int layer, int slot) const { return row(region, layer, false, slot); }
    uint8_t* v_row(int region, int layer, int slot) const { return row(region, layer, true, slot); }
    // A layout with the groups that rows have in this layer: `full` ones, or those of the middle.
    RowLayout groups_of(int layer, bool value_side, bool full) const {
        return full && has_side(layer, value_side) ? full_[static_cast<size_t>(layer)].view()
                                                   : layout(middle_, layer, value_side);
    }

    // A layer that may choose what it reads holds a row of K for every step of its middle; kernels copy 16 bytes at a time.
    size_t mean_bytes(int layer) const {
        if (options_.kv_read == 0 || !has_rows(layer) || in_ring_[static_cast<size_t>(layer)]) return 0;
        const auto n_steps = static_cast<size_t>(regions_[static_cast<size_t>(middle_)].n_slots / step_slots);
        return n_steps * static_cast<size_t>(k_layout(middle_, layer).row_bytes) + 16;
    }

    // Rows of recent slots into the middle, those of this layer on the host.
    void demote(int layer, std::span<const RowMove> moves);
    // Rows within recent, those of this layer on the host.
    void move_recent(int layer, std::span<const SlotMove> moves) const;
    // Rows within the middle, of every layer and device: whole token blocks (regroup_rows).
    void merge(std::span<const SlotMove> moves);

private:
    template <typename F>
    RegionRows make_region(std::string name, int n_slots, const std::optional<RegionFormat>& exact, F&& holds) const;
    void pay_for_cells(Arena& arena, int n_runs);
    std::shared_ptr<CacheStorage> make_storage(std::span<const RegionRows> regions) const;
    std::optional<Format> chosen_format(int layer, bool value_side) const;
    const LayerCacheSpec& layer_spec(int layer) const { return spec_.layers[static_cast<size_t>(layer)]; }
    std::vector<float> middle_values(int layer, bool value_side, std::span<const int> slots) const;
    void encode(int layer, bool value_side, std::span<const RowMove> moves) const;
    void move_to_token_blocks(int layer, std::span<const RowMove> moves) const;

    CacheSpec spec_;
    KvCacheOptions options_;
    std::vector<HeadShape> heads_;  // of every layer
    std::vector<CacheDevice*> devices_;
    RowEncoder* encoder_ = nullptr;
    std::vector<RowPlan> full_;  // layouts with the groups of full rows, of every layer
    std::vector<RegionRows> regions_;
    std::vector<bool> in_ring_;  // of every layer
    int recent_ = -1;
    int middle_ = -1;
    int ring_ = -1;
    bool shares_memory_ = false;
    std::vector<size_t> for_cells_;  // of every run, where memory is shared
};

}  // namespace lkv
