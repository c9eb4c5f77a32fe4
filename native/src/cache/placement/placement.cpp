#include "cache/placement/placement.h"

#include <algorithm>

#include "base/error.h"

namespace lkv {

Placement::Placement(const PlacementOptions& options, const Sizes& sizes, int n_layers)
    : options_(options), of_layer_(static_cast<size_t>(n_layers), nullptr) {
    if (sizes.sink > 0) {
        sink_ = n_regions();
        regions_.emplace_back(sizes.sink);
    }
    if (sizes.recent > 0) {
        recent_ = n_regions();
        // it may be a share of the context, and its earliest tokens leave
        regions_.emplace_back(sizes.recent, 1, 2048);
    }
    regions_.emplace_back(sizes.middle, sizes.block);
}

void Placement::select(std::unique_ptr<Ring> ring, const std::vector<bool>& in_layer) {
    ring_ = std::move(ring);
    serve(ring_.get(), in_layer);
}

void Placement::select(std::unique_ptr<Eviction> eviction, const std::vector<bool>& in_layer) {
    eviction_ = std::move(eviction);
    serve(eviction_.get(), in_layer);
}

void Placement::serve(Selection* selection, const std::vector<bool>& in_layer) {
    selections_.push_back(selection);
    for (size_t il = 0; il < of_layer_.size(); il++) {
        if (in_layer[il]) of_layer_[il] = selection;
    }
}

void Placement::allocate() {
    for (Cells& cells : regions_) cells.allocate();
    for (Selection* selection : selections_) selection->allocate();
}

const Cells& Placement::cells(int region, int layer) const {
    const Selection* const selection = of_layer_[static_cast<size_t>(layer)];
    return region == middle() && selection != nullptr ? selection->cells(layer) : cells(region);
}

int Placement::n_used() const {
    int n = 0;
    for (const Cells& cells : regions_) n += cells.n_used();
    return n;
}

std::vector<SlotMove> Placement::merges(int n_blocks) const {
    const Cells& cells = regions_.back();
    return cells.merges(n_blocks - cells.n_free() / cells.block());
}

void Placement::merge(std::span<const SlotMove> moves) {
    regions_.back().merge(moves);
    version_++;
}

uint64_t Placement::n_visited() const {
    uint64_t n = 0;
    for (const Cells& cells : regions_) n += cells.n_visited();
    for (const Selection* selection : selections_) n += selection->n_visited();
    return n;
}

SlotRef Placement::row_of(const SlotRef& at, int layer) const {
    const Selection* const selection = of_layer_[static_cast<size_t>(layer)];
    const bool selected = at.region == middle() && selection != nullptr;
    return {at.region, selected ? selection->slot_of(at, layer) : at.slot};
}

std::vector<RowMove> Placement::moves_of(int layer, std::span<const RowMove> moves) const {
    std::vector<RowMove> in_layer;
    for (size_t i = 0; i < moves.size(); i++) {
        const RowMove& move = moves[i];
        const int to = row_of({middle(), move.to, move.ring, static_cast<int>(i)}, layer).slot;
        if (to >= 0) in_layer.push_back({move.from, to, move.ring});
    }
    return in_layer;
}

uint64_t Placement::sequences() const {
    uint64_t mask = 0;
    for (const Cells& cells : regions_) mask |= cells.sequences();
    return mask;
}

void Placement::check_seq(int seq) const {
    if (seq < 0 || seq >= options_.n_seq_max) {
        fail("sequence", "expected 0 to ", options_.n_seq_max - 1, "; got ", seq, "; raise n_seq_max");
    }
}

int32_t Placement::first(int seq) const {
    check_seq(seq);
    int32_t first = -1;
    for (const Cells& cells : regions_) {
        const int32_t here = cells.first(seq);
        if (here >= 0 && (first < 0 || here < first)) first = here;
    }
    return first;
}

int32_t Placement::last(int seq) const {
    check_seq(seq);
    int32_t last = -1;
    for (const Cells& cells : regions_) last = std::max(last, cells.last(seq));
    return last;
}

int32_t Placement::last_before(int seq, int32_t end) const {
    int32_t last = this->last(seq);
    if (last < end) return last;
    last = -1;
    for (const Cells& cells : regions_) {
        for (const int slot : cells.slots_of(seq, {0, end})) last = std::max(last, cells.pos(slot));
    }
    return last;
}

int32_t Placement::settled(int seq) const {
    check_seq(seq);
    if (!is_divisible()) return 0;
    // exact tokens outside of the window may leave, but what is saved of them is as good
    const int32_t waiting =
        recent_ < 0 ? -1 : std::max(cells(recent_).first(seq), has_tiers() ? first_exact(seq, 0) : -1);
    return waiting < 0 ? last(seq) + 1 : waiting;
}

bool Placement::is_divisible() const {
    return std::none_of(selections_.begin(), selections_.end(), [](Selection* s) { return s->follower() == nullptr; });
}

}  // namespace lkv
