// The ring: slots of the middle for layers with a sliding window, as many as their windows need. It holds the tokens that a sequence's
// next token may see in the longest of these windows, and as many older ones as there is room for: when tokens are removed from a
// sequence's end, its next token sees those again.
#pragma once

#include <vector>

#include "cache/placement/selection.h"

namespace lkv {

class Ring : public Selection {
public:
    Ring(int n_slots, int window) : cells_(n_slots), window_(window) {}

    int window() const { return window_; }  // the longest of a layer
    const Cells& cells() const { return cells_; }
    Cells& cells() { return cells_; }
    // Whether some sequence that holds the token will see it again.
    bool is_seen_again(const Placement& all, const Token& token) const;
    // Frees slots whose tokens no query will see again, the oldest first, so that n are free. True: some were freed. Errors: Error when
    // fewer than n can be free; nothing has changed.
    bool make_room(const Placement& all, int n);

    void allocate() override { cells_.allocate(); }
    const Cells& cells(int) const override { return cells_; }
    int slot_of(const SlotRef& at, int) const override { return at.ring; }
    uint64_t n_visited() const override { return cells_.n_visited(); }
    bool prepare(const Placement& all, const NewTokens& tokens) override;
    bool enter(const Placement& all, const NewTokens& tokens, std::span<SlotRef> slots) override;
    void demote(const Placement& all, std::span<RowMove> moves) override;
    void release(const SlotRef& at) override;
    Cells* follower() override { return &cells_; }
    void forget(int) override {}
    void clear() override { cells_.clear(); }
    bool is_complete(const Placement& all, uint64_t sequences) const override;

private:
    std::vector<bool> reached(const Placement& all, const NewTokens& tokens) const;

    Cells cells_;
    int window_;
};

}  // namespace lkv
