// The tokens of the middle that some layers keep, where these are not all: those of their windows (ring.h), or the ones that have
// received most attention (eviction.h). A selection is a kind of placement: it has slots of its own for its layers, and takes part in
// every verb of Placement.
#pragma once

#include <cstdint>
#include <span>

#include "cache/placement/cells.h"

namespace lkv {

class Placement;

// Where a token is.
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

// New tokens. settles: they are whole sequences, and each token goes to the region that it is in after the last one.
struct NewTokens {
    std::span<const int32_t> pos;
    std::span<const int32_t> seq;
    bool settles;
    Token operator[](size_t i) const { return {pos[i], bit(seq[i])}; }
    size_t size() const { return pos.size(); }
};

class Selection {
public:
    virtual ~Selection() = default;
    virtual void allocate() = 0;
    virtual const Cells& cells(int layer) const = 0;
    // The slot of a token in a layer, -1: it has none there.
    virtual int slot_of(const SlotRef& at, int layer) const = 0;
    virtual uint64_t n_visited() const = 0;  // Cells::n_visited of all its cells

    // Around the claim of new tokens' slots, before and after. True: slots have changed hands. Errors: Error for no room; nothing has
    // changed then.
    virtual bool prepare(const Placement&, const NewTokens&) { return false; }
    virtual bool enter(const Placement& all, const NewTokens& tokens, std::span<SlotRef> slots) = 0;
    // Recent tokens have slots in the middle. Errors: as above.
    virtual void demote(const Placement& all, std::span<RowMove> moves) = 0;
    // Takes back what enter() or demote() gave.
    virtual void release(const SlotRef& at) = 0;
    // Once all slots of a batch are released: forgets what enter() counted.
    virtual void take_back() {}

    // Cells in which tokens are removed, copied and shifted as in the middle's. Null: that is possible for whole sequences only, by
    // forget().
    virtual Cells* follower() = 0;
    virtual void forget(int seq) = 0;  // a sequence has no tokens any more
    virtual void clear() = 0;
    // Whether the next tokens of these sequences find what they see.
    virtual bool is_complete(const Placement& all, uint64_t sequences) const = 0;
};

}  // namespace lkv
