#include "cache/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"

namespace lkv {
namespace {

// Slots of an exact window come in multiples of this, so that the rows of every layer start on 64 bytes. No kernel reads
// rows of slots that are not in use, so whole tiles would be room for nothing: 4 sinks took 64 slots.
constexpr int exact_step = 16;

uint64_t bit(int seq) { return uint64_t{1} << seq; }

bool in_range(int32_t pos, int32_t p0, int32_t p1) { return (p0 < 0 || pos >= p0) && (p1 < 0 || pos < p1); }

std::optional<Format> whole_format(std::optional<RegionFormat> region, std::optional<Format> chosen) {
    if (!region) {
        return std::nullopt;
    }
    constexpr int width = 256;  // any that every format can hold
    if (region->asked_for || !chosen) {
        return region->format;
    }
    const Format rows = format_of_rows(*chosen);
    return format_bytes(rows, width) > format_bytes(region->format, width) ? rows : region->format;
}

// The row of one tensor: every segment in `whole` where given. Else the file's plan (f16 without one), with another
// format for what it stores where one is chosen.
RowPlan plan_row(const std::string& region, const char* side, const TensorSpec& spec, std::optional<Format> whole,
                 std::optional<Format> chosen) {
    std::vector<std::vector<SegmentSpec>> groups;
    for (size_t g = 0; g < spec.segments.size(); g++) {
        std::vector<SegmentSpec> segments;
        for (size_t s = 0; s < spec.segments[g].size(); s++) {
            const int width = spec.segments[g][s];
            Format format = whole.value_or(spec.formats ? (*spec.formats)[g][s] : Format::f16);
            if (!whole && chosen && format != Format::none) {
                format = *chosen;
            }
            if (width % format_width_multiple(format) != 0) {
                fail(std::string("kv ") + side, "expected segments in multiples of ", format_width_multiple(format),
                     " channels for ", format_name(format), " rows; choose another --kv",
                     whole ? "-" + region : std::string(), "; got ", width);
            }
            if (format_in_blocks(format)) {
                if (whole) {
                    fail("kv_" + region, "expected a format of single tokens, as ", format_name(format_of_rows(format)),
                         ": blocks of 32 are for K of compressed tokens; got ", format_name(format));
                }
                if (side == std::string_view("v")) {
                    fail("kv v", "expected a format of single tokens for V; choose --kv ", format_name(format), '/',
                         format_name(format_of_rows(format)), "; got ", format_name(format));
                }
            }
            segments.push_back({format, width});
        }
        groups.push_back(std::move(segments));
    }
    return RowPlan(groups);
}

}  // namespace

KvCache::KvCache(const HParams& hparams, const CacheSpec& file_spec, const KvCacheOptions& options, bool allocate,
                 const std::vector<CacheDevice*>& devices)
    : options_(options), devices_(devices), whole_(RowPlan::uniform(hparams.n_kv, hparams.head_dim, Format::f16)) {
    CacheSpec spec = file_spec;
    if (!options_.k_plan.empty()) {
        spec.set_formats(&LayerCacheSpec::k, options_.k_plan, "k_plan");
    }
    if (!options_.v_plan.empty()) {
        spec.set_formats(&LayerCacheSpec::v, options_.v_plan, "v_plan");
    }
    for (int il = 0; il < hparams.n_layer; il++) {
        const LayerCacheSpec& layer = spec.layers[static_cast<size_t>(il)];
        exact_is_full_.push_back(layer.exact_is_full());
        is_full_path_[0].push_back(layer.k_path == KPath::full);
        is_full_path_[1].push_back(layer.v_path == VPath::full);
    }
    const auto all = [](int) { return true; };
    if (options_.sink > 0) {
        regions_.push_back(
            make_region(hparams, spec, "sink", options_.sink * options_.n_seq_max, options_.sink_format, all));
    }
    if (options_.keeps_recent()) {
        const int share = static_cast<int>(std::ceil(options_.recent_ratio * options_.n_ctx));
        const int64_t slots = int64_t{options_.recent + demotion_batch} * options_.n_seq_max + share +
                              std::min(options_.n_ubatch, options_.exact_ubatch);
        regions_.push_back(make_region(hparams, spec, "recent",
                                       static_cast<int>(std::min<int64_t>(slots, options_.n_ctx)),
                                       options_.recent_format, all));
    }
    add_middle(hparams, spec);
    if (allocate) {
        allocate_regions();
    }
}

void KvCache::add_middle(const HParams& hparams, const CacheSpec& spec) {
    in_ring_.assign(static_cast<size_t>(hparams.n_layer), false);
    const auto inside = [this](int il) { return in_ring(il); };
    const auto outside = [this](int il) { return !in_ring(il); };
    const bool evicts = options_.evict.policy != nullptr;
    if (evicts) check_eviction();
    const int n_middle =
        evicts
            ? static_cast<int>(std::min(int64_t{options_.n_ctx}, int64_t{options_.evict_budget()} * options_.n_seq_max))
            : options_.n_ctx;
    const auto make_middle = [&] { return make_region(hparams, spec, "middle", n_middle, std::nullopt, outside); };
    regions_.push_back(make_middle());
    if (in_blocks()) {
        check_blocks();
    } else if (const int n_slots = choose_ring(hparams); n_slots > 0) {
        regions_.back() = make_middle();
        ring_ = make_region(hparams, spec, "ring", n_slots, std::nullopt, inside);
        check_ring_formats();
    }
    if (evicts) {
        add_eviction(hparams);
    }
    for (int il = 0; il < hparams.n_layer; il++) {
        f16_bytes_ += 2.0 * 2.0 * hparams.width_kv() * region_of(n_regions() - 1, il).cells.capacity();
    }
}

void KvCache::check_eviction() const {
    if (options_.runs.size() > 1) {
        fail("evict", "expected all layers on one device; got ", runs_text(options_.runs),
             "; use -ngl 0, or 99 with --split-mode none");
    }
    if (options_.recent_ratio > 0) {
        fail("evict", "expected a number of recent tokens, --recent N; got a share of the sequence, ",
             options_.recent_ratio);
    }
    const int least = options_.sink + options_.recent + slot_tile;
    if (options_.evict.keep < least) {
        fail("keep_tokens", "expected at least ", least, " tokens: ", options_.sink, " sinks, ", options_.recent,
             " recent ones and ", slot_tile, " compressed ones; raise --keep-tokens, or lower --sink or --recent; got ",
             options_.evict.keep);
    }
}

void KvCache::add_eviction(const HParams& hparams) {
    Region& middle = regions_.back();
    if (in_blocks()) {
        fail("evict", "expected a format of single tokens for K, as tokens go one by one; choose --kv q8 … q2; got ",
             "blocks of 32 (c8 … c2)");
    }
    std::vector<bool> evicts;
    for (int il = 0; il < hparams.n_layer; il++) evicts.push_back(!in_ring(il));
    if (std::find(evicts.begin(), evicts.end(), true) == evicts.end()) {
        fail("evict", "expected a layer that holds the context; got sliding windows in all, which hold ", ring_window_,
             " tokens; leave out --evict");
    }
    const EvictPolicy& policy = *options_.evict.policy;
    const int share = (options_.evict.keep - options_.sink) * policy.latest_of_100 / 100;
    const int latest = policy.most_latest > 0 ? std::min(share, policy.most_latest) : share;
    const int recent = region_index("recent");
    eviction_.emplace(policy,
                      Eviction::Sizes{options_.evict_budget(), latest, middle.n_slots,
                                      recent < 0 ? 0 : regions_[static_cast<size_t>(recent)].n_slots},
                      evicts);
    middle.cells = Cells(static_cast<int>(whole_tiles(options_.n_ctx)));
    middle.is_part = true;
}

// Rows first: their pages are untouched, and a system that refuses them does so before any cell is written.
void KvCache::allocate_regions() {
    const auto allocate = [this](Region& region) {
        const size_t bytes = region.k_bytes + region.v_bytes;
        std::vector<SplitStorage::Piece> pieces;
        for (size_t i = 0; i < devices_.size(); i++) {
            const size_t size = region.bytes_of(options_.runs[i]);
            if (devices_[i] == nullptr) {
                pieces.push_back({size, std::make_unique<HostStorage>(size)});
            } else {
                pieces.push_back({size, devices_[i]->allocate(size)});
            }
        }
        if (pieces.empty()) {
            region.storage = std::make_unique<HostStorage>(bytes);
        } else if (pieces.size() == 1) {
            region.storage = std::move(pieces.front().storage);
        } else {
            region.storage = std::make_unique<SplitStorage>(std::move(pieces));
        }
    };
    for (Region& region : regions_) {
        allocate(region);
    }
    if (ring_) {
        allocate(*ring_);
        ring_->cells.allocate();
    }
    for (Region& region : regions_) {
        region.cells.allocate();
    }
    if (eviction_) {
        eviction_->allocate();
    }
}

template <typename F>
KvCache::Region KvCache::make_region(const HParams& hparams, const CacheSpec& spec, std::string name, int n_slots,
                                     std::optional<RegionFormat> format, F&& holds) const {
    n_slots = format ? (n_slots + exact_step - 1) / exact_step * exact_step : static_cast<int>(whole_tiles(n_slots));
    Region region{std::move(name), Cells(n_slots), n_slots, {}, nullptr};
    bool blocks = false;
    size_t offset = 0;
    for (int il = 0; il < hparams.n_layer; il++) {
        const LayerCacheSpec& layer_spec = spec.layers[static_cast<size_t>(il)];
        const bool full = format && exact_is_full_[static_cast<size_t>(il)];
        const TensorSpec whole = TensorSpec::full(hparams.n_kv, hparams.head_dim);
        Layer layer;
        layer.k_plan = plan_row(region.name, "k", full ? whole : layer_spec.k, whole_format(format, options_.k_format),
                                options_.k_format);
        layer.v_plan = plan_row(region.name, "v", full ? whole : layer_spec.v, whole_format(format, options_.v_format),
                                options_.v_format);
        layer.k = layer.k_plan.view();
        layer.v = layer.v_plan.view();
        blocks = blocks || (holds(il) && lkv::in_blocks(layer.k));
        const size_t rows = holds(il) ? static_cast<size_t>(n_slots) : 0;
        const size_t k_bytes = static_cast<size_t>(layer.k.row_bytes) * rows;
        const size_t v_bytes = static_cast<size_t>(layer.v.row_bytes) * rows;
        layer.held = rows > 0;
        layer.k_offset = offset;
        layer.v_offset = offset + k_bytes;
        offset += k_bytes + v_bytes;
        region.k_bytes += k_bytes;
        region.v_bytes += v_bytes;
        region.layers.push_back(std::move(layer));
    }
    if (blocks) {
        region.cells = Cells(n_slots, block_slots);
    }
    return region;
}

void KvCache::check_blocks() const {
    if (!options_.keeps_recent()) {
        fail("recent",
             "expected recent tokens, --recent 1 or more, beside rows of K in blocks of 32 tokens (c8 … c2), ",
             "as a block waits there until it is full; got none");
    }
}

void KvCache::check_ring_formats() const {
    if (ring_->cells.block() > 1) {
        fail("kv k",
             "expected a format of single tokens, as layers with a sliding window keep no recent tokens, among which ",
             "blocks of 32 (c8 … c2) wait; choose --kv q8 … q2; got blocks");
    }
}

int KvCache::region_index(const char* name) const {
    for (size_t r = 0; r < regions_.size(); r++) {
        if (regions_[r].name == name) {
            return static_cast<int>(r);
        }
    }
    return -1;
}

int KvCache::n_used() const {
    int n = 0;
    for (const Region& region : regions_) {
        n += region.cells.n_used();
    }
    return n;
}

bool KvCache::on_host(int layer) const {
    for (size_t i = 0; i < devices_.size(); i++) {
        if (layer < options_.runs[i].end_layer) return devices_[i] == nullptr;
    }
    return true;
}

int KvCache::n_occupied() const {
    int n = 0;
    for (const Region& region : regions_) {
        n += region.cells.n_occupied();
    }
    return n;
}

KvBytes KvCache::bytes() const {
    KvBytes total;
    total.runs.resize(options_.runs.size(), 0);
    const auto add = [this, &total](const Region& region) {
        const size_t cells = Cells::bytes_per_slot() * static_cast<size_t>(region.cells.capacity()) +
                             (region.is_part ? eviction_->bytes() : 0);
        total.regions.push_back({region.name, region.n_slots,
                                 region.is_part ? eviction_->most_used() : region.cells.n_used(), region.k_bytes,
                                 region.v_bytes});
        for (size_t i = 0; i < options_.runs.size(); i++) total.runs[i] += region.bytes_of(options_.runs[i]);
        total.k += region.k_bytes;
        total.v += region.v_bytes;
        total.cells += cells;
        return static_cast<double>(region.k_bytes + region.v_bytes + cells);
    };
    for (const Region& region : regions_) {
        total.per_token = add(region);  // of the middle, the last
    }
    if (ring_) {
        total.per_token += add(*ring_);
    }
    const int n_slots = total.n_cells = regions_.back().cells.capacity();
    total.per_token /= n_slots;
    const auto row_bytes = [](const Region& region) {
        return static_cast<double>(region.k_bytes + region.v_bytes) / region.n_slots;
    };
    if (options_.recent_ratio > 0) {
        const Region& recent = regions_[static_cast<size_t>(region_index("recent"))];
        total.per_token += options_.recent_ratio * (row_bytes(recent) - row_bytes(regions_.back()));
    }
    for (int il = 0; il < static_cast<int>(in_ring_.size()); il++) {
        total.layer_slots.push_back(cells(n_regions() - 1, il).capacity());
    }
    total.f16_per_token = f16_bytes_ / n_slots;
    return total;
}

RegionView KvCache::view(int region, int layer) const {
    const Region& r = region_of(region, layer);
    const Layer& l = r.layers[static_cast<size_t>(layer)];
    const auto rows = [&r](size_t offset) {  // null in a forecast
        return r.storage == nullptr ? nullptr : r.storage->at(offset);
    };
    const Cells& held = cells(region, layer);
    const int n_slots = l.held ? held.end() : 0;
    return {rows(l.k_offset), rows(l.v_offset), held.pos_data(), held.seq_data(), n_slots, l.k, l.v};
}

const RowLayout& KvCache::k_layout(int region, int layer) const {
    return regions_[static_cast<size_t>(region)].layers[static_cast<size_t>(layer)].k;
}

const RowLayout& KvCache::v_layout(int region, int layer) const {
    return regions_[static_cast<size_t>(region)].layers[static_cast<size_t>(layer)].v;
}

uint8_t* KvCache::k_row(int region, int layer, int slot) {
    const Region& r = region_of(region, layer);
    const Layer& l = r.layers[static_cast<size_t>(layer)];
    return r.storage->at(l.k_offset) + static_cast<size_t>(slot) * static_cast<size_t>(l.k.row_bytes);
}

uint8_t* KvCache::v_row(int region, int layer, int slot) {
    const Region& r = region_of(region, layer);
    const Layer& l = r.layers[static_cast<size_t>(layer)];
    return r.storage->at(l.v_offset) + static_cast<size_t>(slot) * static_cast<size_t>(l.v.row_bytes);
}

template <typename F>
void KvCache::each_slot(F&& visit) {
    cells_version_++;
    const auto each = [&visit](Cells& cells) {
        for (int slot = 0; slot < cells.end(); slot++) {
            if (cells.used(slot)) {
                visit(cells, slot);
            }
        }
    };
    for (Region& region : regions_) {
        each(region.cells);
    }
    if (ring_) {
        each(ring_->cells);
    }
}

template <typename F>
bool KvCache::keeps_windows(F&& verb) {
    if (!ring_) {
        each_slot(verb);
        return true;
    }
    std::vector<Cells> before;
    for (const Region& region : regions_) {
        before.push_back(region.cells);
    }
    before.push_back(ring_->cells);
    each_slot(verb);
    if (ring_is_complete()) {
        return true;
    }
    ring_->cells = std::move(before.back());
    for (size_t r = 0; r < regions_.size(); r++) {
        regions_[r].cells = std::move(before[r]);
    }
    return false;
}

void KvCache::clear() {
    cells_version_++;
    for (Region& region : regions_) {
        region.cells.clear();
    }
    if (ring_) {
        ring_->cells.clear();
    }
    if (eviction_) {
        eviction_->clear();
    }
}

void KvCache::release_sequence(int seq) {
    if (eviction_) eviction_->remove(seq);
    each_slot([&](Cells& cells, int slot) { cells.set_seq(slot, cells.seq(slot) & ~(uint64_t{1} << seq)); });
    cells_version_++;
}

bool KvCache::takes_part(int seq, int32_t p0, int32_t p1) const {
    bool some = false;
    bool all = true;
    each_slot([&](const Cells& cells, int slot) {
        if ((cells.seq(slot) & bit(seq)) == 0) return;
        const bool in = in_range(cells.pos(slot), p0, p1);
        some = some || in;
        all = all && in;
    });
    return some && !all;
}

bool KvCache::seq_rm(int seq, int32_t p0, int32_t p1) {
    const int first = std::max(0, seq);
    const int end = seq < 0 ? options_.n_seq_max : seq + 1;
    for (int s = first; eviction_ && s < end; s++) {
        if (takes_part(s, p0, p1)) return false;
    }
    const uint64_t mask = seq < 0 ? ~uint64_t{0} : bit(seq);
    const bool done = keeps_windows([&](Cells& cells, int slot) {
        if (in_range(cells.pos(slot), p0, p1)) {
            cells.set_seq(slot, cells.seq(slot) & ~mask);
        }
    });
    for (int s = first; done && eviction_ && s < end; s++) {
        if (seq_pos_max(s) < 0) eviction_->remove(s);
    }
    return done;
}

bool KvCache::seq_cp(int src, int dst, int32_t p0, int32_t p1) {
    if (eviction_) return false;
    return keeps_windows([&](Cells& cells, int slot) {
        if ((cells.seq(slot) & bit(src)) != 0 && in_range(cells.pos(slot), p0, p1)) {
            cells.set_seq(slot, cells.seq(slot) | bit(dst));
        }
    });
}

void KvCache::seq_keep(int seq) {
    for (int s = 0; eviction_ && s < options_.n_seq_max; s++) {
        if (s != seq) eviction_->remove(s);
    }
    each_slot([&](Cells& cells, int slot) { cells.set_seq(slot, cells.seq(slot) & bit(seq)); });
}

bool KvCache::seq_add(int seq, int32_t p0, int32_t p1, int32_t delta) {
    return keeps_windows([&](Cells& cells, int slot) {
        if ((cells.seq(slot) & bit(seq)) == 0 || !in_range(cells.pos(slot), p0, p1)) {
            return;
        }
        if (cells.pos(slot) + delta < 0) {
            cells.release(slot);
        } else {
            cells.shift(slot, delta);
        }
    });
}

int32_t KvCache::seq_pos_min(int seq) const {
    int32_t found = -1;
    each_slot([&](const Cells& cells, int slot) {
        if ((cells.seq(slot) & bit(seq)) != 0) {
            found = found < 0 ? cells.pos(slot) : std::min(found, cells.pos(slot));
        }
    });
    return found;
}

int32_t KvCache::seq_pos_max(int seq) const {
    int32_t found = -1;
    each_slot([&](const Cells& cells, int slot) {
        if ((cells.seq(slot) & bit(seq)) != 0) {
            found = std::max(found, cells.pos(slot));
        }
    });
    return found;
}

}  // namespace lkv
