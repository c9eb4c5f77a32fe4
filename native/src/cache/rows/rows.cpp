#include "cache/rows/rows.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace lkv {
namespace {

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
            if (format_in_token_blocks(format)) {
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

// The slots in runs, ascending; a gap of at most `gap` slots does not end one.
std::vector<std::pair<int, int>> runs_of(std::vector<int>& slots, int gap) {
    std::sort(slots.begin(), slots.end());
    std::vector<std::pair<int, int>> runs;
    for (const int slot : slots) {
        if (runs.empty() || slot > runs.back().second + gap) runs.emplace_back(slot, slot);
        runs.back().second = slot + 1;
    }
    return runs;
}

void add_runs(const LayerRows& layer, std::span<const std::pair<int, int>> runs, std::vector<ByteRange>& to) {
    for (int side = 0; side < 2; side++) {
        const auto bytes = static_cast<size_t>(layer.layout[side].row_bytes);
        const bool in_one = layer.page[side] == bytes_of_page(layer.layout[side].row_bytes);
        for (const auto& [begin, end] : runs) {
            if (bytes == 0) continue;
            for (int first = begin, next = 0; first < end; first = next) {
                next = in_one ? end : std::min(end, (first / page_slots + 1) * page_slots);
                const size_t at = layer.at(side, first);
                to.push_back({at, at + static_cast<size_t>(next - first) * bytes});
            }
        }
    }
}

}  // namespace

std::vector<ByteRange> RegionRows::ranges_of(std::vector<int> slots, int gap) const {
    const std::vector<std::pair<int, int>> runs = runs_of(slots, gap);
    std::vector<ByteRange> ranges;
    for (const LayerRows& layer : layers) {
        if (has_row(layer)) add_runs(layer, runs, ranges);
    }
    return ranges;
}

void RegionRows::add_ranges(const LayerRows& layer, std::vector<int> slots, int gap, std::vector<ByteRange>& to) {
    add_runs(layer, runs_of(slots, gap), to);
}

Rows::Rows(const HParams& hparams, const CacheSpec& spec, const KvCacheOptions& options,
           const std::vector<CacheDevice*>& devices)
    : spec_(spec), options_(options), heads_(hparams.heads), devices_(devices) {
    for (const HeadShape& heads : heads_) full_.push_back(RowPlan::uniform(heads.n_kv, heads.head_dim, Format::f16));
    if (!options.k_plan.empty()) spec_.set_formats(&LayerCacheSpec::k, options.k_plan, "k_plan");
    if (!options.v_plan.empty()) spec_.set_formats(&LayerCacheSpec::v, options.v_plan, "v_plan");
}

void Rows::add_exact(const std::string& name, int n_slots, const RegionFormat& format) {
    if (name == "recent") recent_ = static_cast<int>(regions_.size());
    regions_.push_back(make_region(name, n_slots, format, [](int) { return true; }));
}

void Rows::add_middle(int n_slots, bool is_selected, int n_ring) {
    middle_ = static_cast<int>(regions_.size());
    const auto is_in = [&](int layer) { return static_cast<bool>(in_ring_[static_cast<size_t>(layer)]); };
    regions_.push_back(make_region("middle", n_slots, std::nullopt, [&](int layer) { return !is_in(layer); }));
    regions_.back().is_selected = is_selected;
    if (n_ring == 0) return;
    ring_ = static_cast<int>(regions_.size());
    regions_.push_back(make_region("ring", n_ring, std::nullopt, is_in));
}

bool Rows::takes_token_blocks() const {
    return std::any_of(spec_.layers.begin(), spec_.layers.end(), [this](const LayerCacheSpec& layer) {
        return in_token_blocks(plan_row("middle", "k", layer.k, std::nullopt, options_.k_format).view());
    });
}

template <typename F>
RegionRows Rows::make_region(std::string name, int n_slots, const std::optional<RegionFormat>& exact, F&& holds) const {
    RegionRows region;
    region.name = std::move(name);
    region.n_slots = n_slots;
    size_t offset = 0;
    for (int il = 0; il < n_layers(); il++) {
        const bool full = exact && exact_is_full(il);
        const HeadShape& heads = heads_[static_cast<size_t>(il)];
        const TensorSpec whole = TensorSpec::full(heads.n_kv, heads.head_dim);
        const size_t rows = holds(il) && layer_spec(il).has_rows() ? static_cast<size_t>(n_slots) : 0;
        LayerRows layer;
        layer.held = rows > 0;
        for (const bool value_side : {false, true}) {
            const int side = value_side ? 1 : 0;
            const bool takes_whole = full && has_side(il, value_side);
            const TensorSpec& spec = takes_whole ? whole : value_side ? layer_spec(il).v : layer_spec(il).k;
            const std::optional<Format> chosen = chosen_format(il, value_side);
            layer.plan[side] = plan_row(region.name, value_side ? "v" : "k", spec, whole_format(exact, chosen), chosen);
            layer.layout[side] = layer.plan[side].view();
            layer.offset[side] = offset;
            const size_t bytes = static_cast<size_t>(layer.layout[side].row_bytes) * rows;
            layer.page[side] = bytes_of_page(layer.layout[side].row_bytes);
            layer.bytes += bytes;
            offset += bytes;
            region.bytes[side] += bytes;
        }
        if (layer_spec(il).is_mla()) {
            if (has_group_scales(layer.layout[1])) {
                fail("kv",
                     "expected a format whose segments have scales of their own, as q4, for rows that are keys and ",
                     "values in one (MLA); got one of n8 … n1 in ", region.name);
            }
            GroupLayout values = layer.layout[1].groups[0];
            const int n = layer_spec(il).key_only;
            if (values.kept < n) {
                fail("v_plan", "expected the ", n, " turned channels of a row stored; got ", values.kept, " channels");
            }
            values = {values.column + n, values.width - n, values.kept - n, values.first_segment, values.n_segments};
            const SegmentLayout* const segments = layer.layout[1].segments;
            for (; values.n_segments > 0 && segments[values.first_segment].column < values.column;
                 values.n_segments--) {
                values.first_segment++;
            }
            layer.value_groups = {values};
        }
        region.layers.push_back(std::move(layer));
    }
    region.storage_bytes = offset;
    return region;
}

RowLayout Rows::values_layout(int region, int layer) const {
    RowLayout found = v_layout(region, layer);
    const LayerRows& rows = regions_[static_cast<size_t>(region)].layers[static_cast<size_t>(layer)];
    if (!rows.value_groups.empty()) found.groups = rows.value_groups.data();
    return found;
}

// MLA's rows are keys and values: K's format comes first, as llama.cpp has it.
std::optional<Format> Rows::chosen_format(int layer, bool value_side) const {
    const bool is_keys = layer_spec(layer).is_mla() && options_.k_format;
    if (is_keys && format_in_token_blocks(*options_.k_format)) {
        fail("kv k", "expected a format of single tokens, as rows are keys and values in one (MLA); choose --kv ",
             format_name(format_of_rows(*options_.k_format)), "; got ", format_name(*options_.k_format));
    }
    if (is_keys && options_.v_format && *options_.v_format != *options_.k_format) {
        fail("kv v", "expected K's format, ", format_name(*options_.k_format),
             ", as rows are keys and values in one (MLA); got ", format_name(*options_.v_format));
    }
    if (value_side && !is_keys) return options_.v_format;
    // Tokens leave a ring one by one, which a token block does not allow. A ring is small enough for K in q8, beside which a few large
    // channels need no rotation.
    const bool single =
        options_.k_format && format_in_token_blocks(*options_.k_format) && in_ring_[static_cast<size_t>(layer)];
    return single ? Format::q8 : options_.k_format;
}

void Rows::allocate() {
    for (size_t r = 0; r < regions_.size(); r++) {
        const bool shares = shares_memory_ && static_cast<int>(r) == recent_;
        if (regions_[r].storage != nullptr) continue;
        regions_[r].storage = make_storage(std::span(regions_).subspan(r, shares ? 2 : 1));
        if (shares) regions_[r + 1].storage = regions_[r].storage;
    }
}

// The regions lie in it together.
std::shared_ptr<CacheStorage> Rows::make_storage(std::span<const RegionRows> regions) const {
    std::vector<SplitStorage::Piece> pieces;
    for (size_t i = 0; i < devices_.size(); i++) {
        size_t size = 0;
        for (const RegionRows& region : regions) size += region.bytes_of(options_.runs[i]);
        if (regions.size() > 1) size -= for_cells_[i];
        if (devices_[i] == nullptr) {
            pieces.push_back({size, std::make_unique<HostStorage>(size)});
        } else {
            pieces.push_back({size, devices_[i]->allocate(size)});
        }
    }
    if (pieces.empty()) return std::make_shared<HostStorage>(regions.front().storage_bytes);
    if (pieces.size() == 1) return std::move(pieces.front().storage);
    return std::make_shared<SplitStorage>(std::move(pieces));
}

}  // namespace lkv
