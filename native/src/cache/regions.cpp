// In which region a token lives: where new ones enter, and what leaves the recent window when.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "base/error.h"
#include "cache/kv_cache.h"

namespace lkv {
namespace {

uint64_t bit(int seq) { return uint64_t{1} << seq; }

}  // namespace

int KvCacheOptions::window(int length) const {
    // files hold the ratio in f32: 0.1 of 100 tokens are 10, not 11
    return std::max(recent, static_cast<int>(std::ceil((recent_ratio - 1e-7) * std::max(0, length - sink))));
}

void KvCache::check_room(size_t n) const {
    if (n_occupied() + static_cast<int>(n) > options_.n_ctx) {
        fail("context", "expected at most ", options_.n_ctx, " cells; raise -c / n_ctx", "; got ",
             n_occupied() + static_cast<int>(n));
    }
}

void KvCache::refuse_recent(std::span<const SlotRef> claimed, size_t wanted) {
    for (const SlotRef& to : claimed) {
        if (to.region >= 0) {
            release(to);
        }
    }
    const Cells& recent = regions_[static_cast<size_t>(region_index("recent"))].cells;
    fail("recent", "expected room for ", wanted, " tokens among the recent ones, where they wait for a block of ",
         block_slots, "; raise --recent or n_seq_max; got ", recent.n_free());
}

std::vector<SlotRef> KvCache::claim_settled(std::span<const int32_t> pos, std::span<const int32_t> seq) {
    check_room(pos.size());
    const int sink = region_index("sink");
    const int recent = region_index("recent");
    const int middle = region_index("middle");
    std::vector<int32_t> first_recent(max_sequences, 0);
    for (size_t i = 0; i < pos.size(); i++) {
        int32_t& first = first_recent[static_cast<size_t>(seq[i])];
        first = std::max(first, pos[i] + 1 - options_.window(pos[i] + 1));
    }
    const int share = ring_share(pos.size());  // all that a sequence's next token sees
    std::vector<int32_t> last(max_sequences, -1);
    for (size_t i = 0; i < pos.size(); i++) {
        last[static_cast<size_t>(seq[i])] = pos[i];
    }
    const auto in_reach = [&](size_t i) { return last[static_cast<size_t>(seq[i])] - pos[i] < share; };
    if (ring_) {
        int n = 0;
        for (size_t i = 0; i < pos.size(); i++) n += in_reach(i) ? 1 : 0;
        make_ring_room(n);
    }
    std::vector<SlotRef> slots(pos.size(), SlotRef{-1, -1});
    const auto fits = [this](int region) {
        return region >= 0 && regions_[static_cast<size_t>(region)].cells.n_free() > 0;
    };
    const auto take = [&](int region, size_t i) {
        slots[i] = {region, regions_[static_cast<size_t>(region)].cells.claim(pos[i], bit(seq[i]))};
    };
    std::vector<std::vector<size_t>> waiting(max_sequences);  // tokens of each sequence that go to blocks
    for (size_t i = 0; i < pos.size(); i++) {
        if (pos[i] < options_.sink && fits(sink)) {
            take(sink, i);
        } else if (pos[i] >= first_recent[static_cast<size_t>(seq[i])] && fits(recent)) {
            take(recent, i);
        } else if (in_blocks()) {
            waiting[static_cast<size_t>(seq[i])].push_back(i);
        } else {
            take(middle, i);
        }
    }
    Cells& cells = regions_.back().cells;
    for (const std::vector<size_t>& tokens : waiting) {
        const size_t whole = tokens.size() / block_slots * block_slots;
        for (size_t n = 0; n < tokens.size(); n++) {
            const size_t i = tokens[n];
            if (n < whole) {
                const int slot = n % block_slots == 0 ? cells.find_block() : slots[tokens[n - 1]].slot + 1;
                cells.place(slot, pos[i], bit(seq[i]));
                slots[i] = {middle, slot};
            } else if (fits(recent)) {
                take(recent, i);
            } else {
                refuse_recent(slots, tokens.size() - n);
            }
        }
    }
    for (size_t i = 0; i < pos.size(); i++) {
        if (enters_ring(slots[i].region) && in_reach(i)) slots[i].ring = ring_->cells.claim(pos[i], bit(seq[i]));
    }
    return slots;
}

std::vector<SlotRef> KvCache::claim(std::span<const int32_t> pos, std::span<const int32_t> seq) {
    check_room(pos.size());
    const int sink = region_index("sink");
    const int recent = region_index("recent");
    const int middle = region_index("middle");
    if (ring_) {
        make_ring_room(static_cast<int>(pos.size()));
    }
    if (eviction_) {
        eviction_->begin(pos, seq);
    }
    std::vector<SlotRef> slots;
    slots.reserve(pos.size());
    std::vector<Arrival> arrivals;
    for (size_t i = 0; i < pos.size(); i++) {
        int target = middle;
        if (sink >= 0 && pos[i] < options_.sink && regions_[static_cast<size_t>(sink)].cells.n_free() > 0) {
            target = sink;
        } else if (recent >= 0 && regions_[static_cast<size_t>(recent)].cells.n_free() > 0) {
            target = recent;
        } else if (in_blocks()) {
            refuse_recent(slots, pos.size() - i);
        }
        slots.push_back({target, regions_[static_cast<size_t>(target)].cells.claim(pos[i], bit(seq[i]))});
        if (enters_ring(target)) {
            slots.back().ring = ring_->cells.claim(pos[i], bit(seq[i]));
        }
        if (eviction_ && target == middle) {
            slots.back().arrival = static_cast<int>(arrivals.size());
            arrivals.push_back({pos[i], seq[i], -1});
        } else if (eviction_ && target == recent) {
            eviction_->enter_recent(slots.back().slot, seq[i]);
        }
    }
    if (eviction_) {
        settle(slots, arrivals);
    }
    return slots;
}

void KvCache::settle(std::span<const SlotRef> slots, std::span<const Arrival> arrivals) {
    const int recent = region_index("recent");
    try {
        if (eviction_->enter(arrivals)) cells_version_++;
    } catch (...) {
        for (SlotRef at : slots) {
            at.arrival = -1;
            release(at);
        }
        throw;
    }
    eviction_->forget(recent < 0 ? nullptr : &regions_[static_cast<size_t>(recent)].cells);
}

std::vector<int> KvCache::old_slots(int n_ahead) const {
    const Cells& cells = regions_[static_cast<size_t>(region_index("recent"))].cells;
    std::vector<int32_t> newest(max_sequences, -1);
    std::vector<int> count(max_sequences, 0);
    for (int slot = 0; slot < cells.end(); slot++) {
        for (int s = 0; s < options_.n_seq_max; s++) {
            if ((cells.seq(slot) & bit(s)) != 0) {
                newest[static_cast<size_t>(s)] = std::max(newest[static_cast<size_t>(s)], cells.pos(slot));
                count[static_cast<size_t>(s)]++;
            }
        }
    }
    std::vector<int> window(max_sequences, 0);
    bool due = false;
    for (size_t s = 0; s < window.size(); s++) {
        newest[s] = std::max(-1, newest[s] - n_ahead);
        count[s] -= n_ahead;
        window[s] = options_.window(newest[s] + 1);
        due = due || count[s] >= window[s] + demotion_batch;
    }
    std::vector<int> slots;
    for (int slot = 0; due && slot < cells.end(); slot++) {
        bool old = cells.used(slot);
        for (int s = 0; old && s < options_.n_seq_max; s++) {
            if ((cells.seq(slot) & bit(s)) != 0) {
                old = cells.pos(slot) <= newest[static_cast<size_t>(s)] - window[static_cast<size_t>(s)];
            }
        }
        if (old) {
            slots.push_back(slot);
        }
    }
    return slots;
}

void KvCache::demote(int n_ahead) {
    const int recent = region_index("recent");
    if (recent < 0) {
        return;
    }
    const std::vector<int> old = old_slots(n_ahead);
    if (old.empty()) {
        return;
    }
    const std::vector<RowMove> moved = in_blocks() ? claim_blocks(old) : claim_moves(old);
    if (moved.empty()) {
        return;
    }
    move_to_middle(moved);
    for (const RowMove& move : moved) {
        regions_[static_cast<size_t>(recent)].cells.release(move.from);
    }
    cells_version_++;
}

std::vector<float> KvCache::middle_values(int layer, bool value_side, std::span<const int> slots) {
    const int from = region_index("recent");
    const RowLayout& layout = value_side ? v_layout(from, layer) : k_layout(from, layer);
    const RowLayout& to = value_side ? v_layout(n_regions() - 1, layer) : k_layout(n_regions() - 1, layer);
    const auto width = static_cast<size_t>(layout.width);
    std::vector<float> rows(slots.size() * width);
    for (size_t i = 0; i < slots.size(); i++) {
        read_row(layout, value_side ? v_row(from, layer, slots[i]) : k_row(from, layer, slots[i]), &rows[i * width]);
    }
    std::vector<float> z(slots.size() * static_cast<size_t>(to.width));
    encoder_->encode(layer, value_side, rows, static_cast<int>(slots.size()), z);
    return z;
}

void KvCache::encode_rows(int layer, bool value_side, std::span<const RowMove> moved) {
    const int middle = n_regions() - 1;
    const RowLayout& layout = value_side ? v_layout(middle, layer) : k_layout(middle, layer);
    std::vector<int> slots;
    for (const RowMove& move : moved) slots.push_back(move.from);
    const std::vector<float> z = middle_values(layer, value_side, slots);
    const float* row = z.data();
    for (const RowMove& move : moved) {
        write_row(layout, row, value_side ? v_row(middle, layer, move.to) : k_row(middle, layer, move.to));
        row += layout.width;
    }
}

// The recent tokens' places in the middle and the ring.
std::vector<RowMove> KvCache::claim_moves(std::span<const int> old) {
    const Cells& recent = regions_[static_cast<size_t>(region_index("recent"))].cells;
    Cells& middle = regions_.back().cells;
    std::vector<int32_t> next;
    const auto seen_again = [&](int slot) { return is_seen_again(recent.pos(slot), recent.seq(slot), next); };
    if (ring_) {
        next = next_positions();
        make_ring_room(static_cast<int>(std::count_if(old.begin(), old.end(), seen_again)));
    }
    if (eviction_) {  // first: it may refuse
        std::vector<Arrival> arrivals;
        for (const int slot : old) arrivals.push_back({recent.pos(slot), std::countr_zero(recent.seq(slot)), slot});
        eviction_->enter(arrivals);
    }
    std::vector<RowMove> moved;
    for (const int slot : old) {
        if (middle.n_free() == 0) {
            break;
        }
        const int target = middle.claim(recent.pos(slot), recent.seq(slot));
        const bool rings = ring_ && seen_again(slot);
        moved.push_back({slot, target, rings ? ring_->cells.claim(recent.pos(slot), recent.seq(slot)) : -1});
    }
    return moved;
}

// The same in whole blocks, each of one sequence.
std::vector<RowMove> KvCache::claim_blocks(std::span<const int> old) {
    const Cells& recent = regions_[static_cast<size_t>(region_index("recent"))].cells;
    Cells& middle = regions_.back().cells;
    // by the first sequence that holds them: tokens that several share fill blocks with that one's own
    std::vector<std::vector<int>> owned(max_sequences);
    for (const int slot : old) {
        owned[static_cast<size_t>(std::countr_zero(recent.seq(slot)))].push_back(slot);
    }
    std::vector<RowMove> moved;
    for (std::vector<int>& slots : owned) {
        std::sort(slots.begin(), slots.end(), [&](int a, int b) { return recent.pos(a) < recent.pos(b); });
        for (size_t first = 0; first + block_slots <= slots.size() && middle.n_free() > 0; first += block_slots) {
            const int target = middle.find_block();
            for (int i = 0; i < block_slots; i++) {
                const int slot = slots[first + static_cast<size_t>(i)];
                middle.place(target + i, recent.pos(slot), recent.seq(slot));
                moved.push_back({slot, target + i, -1});
            }
        }
    }
    return moved;
}

// K of this layer's recent slots into blocks, 32 moves each.
void KvCache::move_to_blocks(int layer, std::span<const RowMove> moved) {
    const int from = region_index("recent");
    const int to = n_regions() - 1;
    for (size_t first = 0; first < moved.size(); first += block_slots) {
        std::array<int, block_slots> slots;
        std::array<const uint8_t*, block_slots> rows;
        for (size_t i = 0; i < rows.size(); i++) {
            slots[i] = moved[first + i].from;
            rows[i] = k_row(from, layer, slots[i]);
        }
        uint8_t* const block = k_row(to, layer, moved[first].to);
        if (is_full(from, layer)) {
            write_block(k_layout(to, layer), middle_values(layer, false, slots).data(), block);
        } else {
            move_block(k_layout(from, layer), rows.data(), k_layout(to, layer), block);
        }
    }
}

void KvCache::move_to_middle(std::span<const RowMove> moved) {
    const int from = region_index("recent");
    const int to = n_regions() - 1;
    for (CacheDevice* device : devices_) {
        if (device != nullptr) device->move_rows(*this, from, to, moved);
    }
    for (int il = 0; il < static_cast<int>(regions_.back().layers.size()) && on_host(il); il++) {
        const std::vector<RowMove> moves = moves_of(il, moved);
        if (moves.empty()) {
            continue;
        }
        const bool blocks = lkv::in_blocks(k_layout(to, il));
        if (blocks) {
            move_to_blocks(il, moves);
        }
        if (is_full(from, il)) {
            if (!blocks) encode_rows(il, false, moves);
            encode_rows(il, true, moves);
            continue;
        }
        for (const RowMove& move : moves) {
            if (!blocks)
                move_rows(k_layout(from, il), k_row(from, il, move.from), k_layout(to, il), k_row(to, il, move.to));
            move_rows(v_layout(from, il), v_row(from, il, move.from), v_layout(to, il), v_row(to, il, move.to));
        }
    }
}

}  // namespace lkv
