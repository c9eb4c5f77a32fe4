// In which region a token lives: where new ones enter, and what leaves the recent window when.
#include <algorithm>
#include <bit>

#include "base/error.h"
#include "cache/placement/placement.h"

namespace lkv {

void Placement::check_room(size_t n) const {
    if (const int64_t wanted = n_used() + static_cast<int64_t>(n); wanted > options_.n_ctx) {
        fail("context", "expected at most ", options_.n_ctx, " cells; got ", wanted, "; raise -c / n_ctx");
    }
}

void Placement::refuse_recent(size_t n_wanted) const {
    fail("recent", "expected room for ", n_wanted, " tokens among the recent ones, where they wait for a block of ",
         cells(middle()).block(), "; raise --recent or n_seq_max; got ", cells(recent_).n_free());
}

std::vector<SlotRef> Placement::claim(const NewTokens& tokens) {
    check_room(tokens.size());
    limit_cells();
    n_claimed_ += tokens.size();
    for (const int32_t s : tokens.seq) claimed_at_[static_cast<size_t>(s)] = n_claimed_;
    for (Selection* selection : selections_) {
        if (selection->prepare(*this, tokens)) version_++;
    }
    std::vector<SlotRef> slots(tokens.size(), SlotRef{-1, -1});
    try {
        place(tokens, slots);
        for (Selection* selection : selections_) {
            if (selection->enter(*this, tokens, slots)) version_++;
        }
    } catch (...) {
        for (const SlotRef& at : slots) {
            if (at.region >= 0) release(at);
        }
        throw;
    }
    return slots;
}

void Placement::take_back(std::span<const SlotRef> slots) {
    for (const SlotRef& at : slots) release(at);
    for (Selection* selection : selections_) selection->take_back();
}

// By sequence: from where on new tokens stay recent.
std::vector<int32_t> Placement::first_recent(const NewTokens& tokens) const {
    std::vector<int32_t> first(max_sequences, 0);
    int n_exact = 0;  // of each sequence, where there is more room than its window; some wait for a block
    if (has_tiers() && tokens.settles) {
        uint64_t sequences = 0;
        for (const int32_t s : tokens.seq) sequences |= bit(s);
        const int room = std::min(cells(recent_).n_free(), -excess(0, static_cast<int>(tokens.size()), {}));
        n_exact = room / std::max(1, std::popcount(sequences)) - cells(middle()).block() + 1;
    }
    for (size_t i = 0; tokens.settles && i < tokens.size(); i++) {
        const int window = std::max(options_.window(tokens.pos[i] + 1), n_exact);
        first[static_cast<size_t>(tokens.seq[i])] = std::max(0, tokens.pos[i] + 1 - window);
    }
    return first;
}

int Placement::n_blocks(const NewTokens& tokens) const {
    const std::vector<int32_t> recent = first_recent(tokens);
    std::vector<int> settling(max_sequences);
    for (size_t i = 0; i < tokens.size(); i++) {
        const auto s = static_cast<size_t>(tokens.seq[i]);
        if (tokens.pos[i] >= options_.sink && tokens.pos[i] < recent[s]) settling[s]++;
    }
    int n = 0;
    for (const int of_sequence : settling) n += of_sequence / cells(middle()).block();
    return n;
}

void Placement::place(const NewTokens& tokens, std::vector<SlotRef>& slots) {
    const std::vector<int32_t> first_recent = this->first_recent(tokens);
    const auto enter = [&](int region, size_t i) {
        const bool fits = region >= 0 && regions_[static_cast<size_t>(region)].n_free() > 0;
        if (fits) slots[i] = {region, regions_[static_cast<size_t>(region)].claim(tokens[i])};
        return fits;
    };
    const auto enter_middle = [&](std::span<const size_t> all, size_t n_left) {
        std::vector<Token> entering;
        for (const size_t i : all) entering.push_back(tokens[i]);
        limit_cells();
        const std::vector<int> claimed = regions_.back().claim(entering);
        for (size_t n = 0; n < all.size(); n++) {
            if (n < claimed.size()) {
                slots[all[n]] = {middle(), claimed[n]};
            } else if (!enter(recent_, all[n])) {  // until a block is full
                refuse_recent(n_left - n);
            }
        }
    };
    std::vector<std::vector<size_t>> settling(max_sequences);  // into the middle
    for (size_t i = 0; i < tokens.size(); i++) {
        if (tokens.pos[i] < options_.sink && enter(sink_, i)) continue;
        if (tokens.pos[i] >= first_recent[static_cast<size_t>(tokens.seq[i])] && enter(recent_, i)) continue;
        if (tokens.settles) {
            settling[static_cast<size_t>(tokens.seq[i])].push_back(i);
        } else {
            enter_middle(std::span(&i, 1), tokens.size() - i);
        }
    }
    for (const std::vector<size_t>& of_sequence : settling) enter_middle(of_sequence, of_sequence.size());
}

void Placement::release(const SlotRef& at) {
    regions_[static_cast<size_t>(at.region)].release(at.slot);
    for (Selection* selection : selections_) selection->release(at);
    version_++;
}

// Tokens of which every sequence that holds them has a whole window of newer ones, in the order of their positions.
std::vector<int> Placement::old_slots(const Guesses& guesses) const {
    const Cells& recent = cells(recent_);
    std::vector<int32_t> first_recent(max_sequences, INT32_MAX);
    bool due = false;
    each_sequence(recent.sequences(), [&](int s) {
        const int32_t n_guesses = guesses[static_cast<size_t>(s)];
        const int32_t newest = std::max(-1, recent.last(s) - n_guesses);
        const int window = options_.window(newest + 1);
        first_recent[static_cast<size_t>(s)] = newest - window + 1;
        due = due || recent.count(s) - n_guesses >= window + demotion_batch;
    });
    std::vector<int> slots;
    each_sequence(due ? recent.sequences() : 0, [&](int s) {
        for (const int slot : recent.slots_of(s, {0, std::max(0, first_recent[static_cast<size_t>(s)])})) {
            bool old = std::countr_zero(recent.seq(slot)) == s;  // of several sequences once
            each_sequence(recent.seq(slot),
                          [&](int other) { old = old && recent.pos(slot) < first_recent[static_cast<size_t>(other)]; });
            if (old) slots.push_back(slot);
        }
    });
    std::sort(slots.begin(), slots.end(),
              [&](int a, int b) { return recent.pos(a) != recent.pos(b) ? recent.pos(a) < recent.pos(b) : a < b; });
    return slots;
}

Placement::Leaving Placement::due(const Guesses& guesses) const {
    const std::vector<int> old = old_slots(guesses);
    if (old.empty()) return {};
    Leaving owned(max_sequences);
    for (const int slot : old) {
        owned[static_cast<size_t>(std::countr_zero(cells(recent_).seq(slot)))].push_back(slot);
    }
    const auto block = static_cast<size_t>(cells(middle()).block());
    for (std::vector<int>& slots : owned) slots.resize(slots.size() / block * block);
    return owned;
}

int Placement::n_blocks(const Leaving& due) const {
    size_t n = 0;
    for (const std::vector<int>& slots : due) n += slots.size();
    return static_cast<int>(n) / cells(middle()).block();
}

std::vector<RowMove> Placement::demote(const Leaving& due) {
    const Cells& recent = cells(recent_);
    limit_cells();
    std::vector<RowMove> moves;
    for (const std::vector<int>& slots : due) {
        std::vector<Token> tokens;
        for (const int slot : slots) tokens.push_back({recent.pos(slot), recent.seq(slot)});
        const std::vector<int> claimed = regions_.back().claim(tokens);
        for (size_t i = 0; i < claimed.size(); i++) moves.push_back({slots[i], claimed[i], -1});
    }
    if (moves.empty()) return moves;
    version_++;
    try {
        for (Selection* selection : selections_) selection->demote(*this, moves);
    } catch (...) {
        for (size_t i = 0; i < moves.size(); i++) {
            release({middle(), moves[i].to, moves[i].ring, static_cast<int>(i)});
        }
        throw;
    }
    return moves;
}

void Placement::leave_recent(std::span<const RowMove> moves) {
    for (const RowMove& move : moves) regions_[static_cast<size_t>(recent_)].release(move.from);
    if (!moves.empty()) version_++;
    limit_cells();
}

}  // namespace lkv
