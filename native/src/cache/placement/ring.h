// The ring: the middle of layers with a sliding window, as many slots as their windows need. Its tokens are those of the middle
// that some sequence's next token may see in the longest of these windows, and as many older ones as there is room for: what is
// removed from the end of a sequence brings them back into sight.
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
    // Gives slots back whose tokens no query will see again, those first that left their window first. True: some had one. Errors:
    // Error when fewer than n would be free then; nothing has changed.
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
