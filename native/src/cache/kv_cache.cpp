#include "cache/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"

namespace lkv {
namespace {

constexpr int slot_tile = 64;  // kernels walk slots in tiles of this many; regions are rounded up to whole tiles

int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

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
                         ": blocks of 32 are the middle's; got ", format_name(format));
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
                 CacheDevice* device)
    : options_(options), device_(device) {
    CacheSpec spec = file_spec;
    if (!options_.k_plan.empty()) {
        spec.set_formats(&LayerCacheSpec::k, options_.k_plan, "k_plan");
    }
    if (!options_.v_plan.empty()) {
        spec.set_formats(&LayerCacheSpec::v, options_.v_plan, "v_plan");
    }
    for (int il = 0; il < hparams.n_layer; il++) {
        exact_is_full_.push_back(spec.layers[static_cast<size_t>(il)].exact_is_full());
    }
    f16_per_token_ = 2.0 * 2.0 * hparams.width_kv() * hparams.n_layer;
    if (options_.sink > 0) {
        add_region(hparams, spec, "sink", options_.sink * options_.n_seq_max, options_.sink_format);
    }
    if (options_.keeps_recent()) {
        const int share = static_cast<int>(std::ceil(options_.recent_ratio * options_.n_ctx));
        const int64_t slots = int64_t{options_.recent + demotion_batch} * options_.n_seq_max + share +
                              std::min(options_.n_ubatch, options_.exact_ubatch);
        add_region(hparams, spec, "recent", static_cast<int>(std::min<int64_t>(slots, options_.n_ctx)),
                   options_.recent_format);
    }
    add_region(hparams, spec, "middle", options_.n_ctx, std::nullopt);
    if (allocate) {
        allocate_regions();
    }
}

// Rows first: their pages are untouched, and a system that refuses them does so before any cell is written.
void KvCache::allocate_regions() {
    for (Region& region : regions_) {
        const size_t bytes = region.k_bytes + region.v_bytes;
        region.storage = device_ != nullptr ? device_->allocate(bytes) : std::make_unique<HostStorage>(bytes);
    }
    for (Region& region : regions_) {
        region.cells.allocate();
    }
}

void KvCache::add_region(const HParams& hparams, const CacheSpec& spec, std::string name, int n_slots,
                         std::optional<RegionFormat> format) {
    n_slots = round_up(n_slots, slot_tile);
    Region region{std::move(name), Cells(n_slots), {}, nullptr, 0, 0};
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
        blocks = blocks || lkv::in_blocks(layer.k);
        const size_t k_bytes = static_cast<size_t>(layer.k.row_bytes) * static_cast<size_t>(n_slots);
        const size_t v_bytes = static_cast<size_t>(layer.v.row_bytes) * static_cast<size_t>(n_slots);
        layer.k_offset = offset;
        layer.v_offset = offset + k_bytes;
        offset += k_bytes + v_bytes;
        region.k_bytes += k_bytes;
        region.v_bytes += v_bytes;
        region.layers.push_back(std::move(layer));
    }
    if (blocks) {
        const char* const format = "rows of K in blocks of 32 tokens (c8 … c2)";
        if (!options_.keeps_recent()) {
            fail("recent", "expected recent tokens, --recent 1 or more, beside ", format,
                 ", as a block waits there until it is full; got none");
        }
        if (device_ != nullptr) {
            fail("kv k", "expected a format of single tokens on a GPU; choose --kv q8 … q2 or -ngl 0; got ", format);
        }
        region.cells = Cells(n_slots, block_slots);
    }
    regions_.push_back(std::move(region));
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

int KvCache::n_occupied() const {
    int n = 0;
    for (const Region& region : regions_) {
        n += region.cells.n_occupied();
    }
    return n;
}

KvBytes KvCache::bytes() const {
    KvBytes total;
    for (const Region& region : regions_) {
        total.regions.push_back(
            {region.name, region.cells.capacity(), region.cells.n_used(), region.k_bytes, region.v_bytes});
        total.k += region.k_bytes;
        total.v += region.v_bytes;
        total.cells += Cells::bytes_per_slot() * static_cast<size_t>(region.cells.capacity());
    }
    const auto row_bytes = [](const Region& region) {
        return static_cast<double>(region.k_bytes + region.v_bytes) / region.cells.capacity();
    };
    total.per_token = row_bytes(regions_.back()) + static_cast<double>(Cells::bytes_per_slot());
    if (options_.recent_ratio > 0) {
        const Region& recent = regions_[static_cast<size_t>(region_index("recent"))];
        total.per_token += options_.recent_ratio * (row_bytes(recent) - row_bytes(regions_.back()));
    }
    total.f16_per_token = f16_per_token_;
    return total;
}

RegionView KvCache::view(int region, int layer) const {
    const Region& r = regions_[static_cast<size_t>(region)];
    const Layer& l = r.layers[static_cast<size_t>(layer)];
    uint8_t* const rows = r.storage == nullptr ? nullptr : r.storage->data();  // null in a forecast
    return {rows + l.k_offset, rows + l.v_offset, r.cells.pos_data(), r.cells.seq_data(), r.cells.end(), l.k, l.v};
}

const RowLayout& KvCache::k_layout(int region, int layer) const {
    return regions_[static_cast<size_t>(region)].layers[static_cast<size_t>(layer)].k;
}

const RowLayout& KvCache::v_layout(int region, int layer) const {
    return regions_[static_cast<size_t>(region)].layers[static_cast<size_t>(layer)].v;
}

uint8_t* KvCache::k_row(int region, int layer, int slot) {
    const Region& r = regions_[static_cast<size_t>(region)];
    const Layer& l = r.layers[static_cast<size_t>(layer)];
    return r.storage->data() + l.k_offset + static_cast<size_t>(slot) * static_cast<size_t>(l.k.row_bytes);
}

uint8_t* KvCache::v_row(int region, int layer, int slot) {
    const Region& r = regions_[static_cast<size_t>(region)];
    const Layer& l = r.layers[static_cast<size_t>(layer)];
    return r.storage->data() + l.v_offset + static_cast<size_t>(slot) * static_cast<size_t>(l.v.row_bytes);
}

template <typename F>
void KvCache::each_slot(F&& visit) {
    cells_version_++;
    for (Region& region : regions_) {
        for (int slot = 0; slot < region.cells.end(); slot++) {
            if (region.cells.used(slot)) {
                visit(region.cells, slot);
            }
        }
    }
}

template <typename F>
void KvCache::each_slot(F&& visit) const {
    for (const Region& region : regions_) {
        for (int slot = 0; slot < region.cells.end(); slot++) {
            if (region.cells.used(slot)) {
                visit(region.cells, slot);
            }
        }
    }
}

void KvCache::clear() {
    cells_version_++;
    for (Region& region : regions_) {
        region.cells.clear();
    }
}

void KvCache::seq_rm(int seq, int32_t p0, int32_t p1) {
    const uint64_t mask = seq < 0 ? ~uint64_t{0} : bit(seq);
    each_slot([&](Cells& cells, int slot) {
        if (in_range(cells.pos(slot), p0, p1)) {
            cells.set_seq(slot, cells.seq(slot) & ~mask);
        }
    });
}

void KvCache::seq_cp(int src, int dst, int32_t p0, int32_t p1) {
    each_slot([&](Cells& cells, int slot) {
        if ((cells.seq(slot) & bit(src)) != 0 && in_range(cells.pos(slot), p0, p1)) {
            cells.set_seq(slot, cells.seq(slot) | bit(dst));
        }
    });
}

void KvCache::seq_keep(int seq) {
    each_slot([&](Cells& cells, int slot) { cells.set_seq(slot, cells.seq(slot) & bit(seq)); });
}

void KvCache::seq_add(int seq, int32_t p0, int32_t p1, int32_t delta) {
    each_slot([&](Cells& cells, int slot) {
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
