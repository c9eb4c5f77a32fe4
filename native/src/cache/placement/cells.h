// Which token each slot of a region holds: slot <-> position <-> sequences. Knows nothing of bytes or layers.
//
// Cells may come in token blocks only. A block is claimed whole; tokens leave it one by one, and it is free again when the last is gone.
// Until then its empty slots are occupied but unused, unless merges() brings what is left of several blocks into fewer.
//
// For every sequence the cells remember the first and the last position, how many tokens it has and whether these follow one
// another without a gap; and for some positions, which slot has them. So no question about a sequence's ends scans the slots, and a
// search near them scans once in as many tokens as are remembered.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cache/pages.h"
#include "cache/placement/sequences.h"

namespace lkv {

struct Token {
    int32_t pos;
    uint64_t seq;  // mask of the sequences that hold it
};

// A token that goes to another slot of its region.
struct SlotMove {
    int from;
    int to;
};

class Cells {
public:
    // block: slots that are claimed together, 1 = each alone; divides n_slots. n_remembered: of so many positions the slot is remembered.
    explicit Cells(int n_slots, int block = 1, int n_remembered = 256)
        : capacity_(n_slots), limit_(n_slots), block_(block), n_remembered_(n_remembered) {}
    void allocate();  // before the first claim; until then every slot is free, and none costs memory

    int block() const { return block_; }
    int capacity() const { return capacity_; }
    int n_used() const { return n_used_; }
    int n_occupied() const { return n_blocks_ * block_; }
    // Slots from n on are not given out for now, as others need their memory. Those in use stay.
    void limit(int n) { limit_ = std::min(n, capacity_); }
    int n_free() const { return std::max(0, limit_ - n_occupied()); }
    int end() const { return end_; }  // one past the highest used slot
    bool used(int slot) const { return seq_[static_cast<size_t>(slot)] != 0; }

    const int32_t* pos_data() const { return pos_.data(); }
    const uint64_t* seq_data() const { return seq_.data(); }
    int32_t pos(int slot) const { return pos_[static_cast<size_t>(slot)]; }
    uint64_t seq(int slot) const { return seq_[static_cast<size_t>(slot)]; }

    uint64_t sequences() const { return sequences_; }  // mask of those that hold a slot
    int count(int seq) const { return holding(seq).count; }
    int32_t first(int seq) const;  // position of a sequence's first token, -1: it holds none
    int32_t last(int seq) const;
    // Slots that a sequence holds at these positions, in no fixed order, but usually from an end of the sequence inwards.
    std::vector<int> slots_of(int seq, const Positions& positions = {}) const;
    // Slots that sequences of `mask` hold at these positions, in order, with all others of their blocks. Scans all cells.
    std::vector<int> blocks_of(uint64_t mask, const Positions& positions = {}) const;

    // A free slot, now this token's: find_free(). Precondition: n_free() > 0, and block() is 1.
    int claim(const Token& token);
    // Slots for tokens of one sequence, in the order of their positions: for all of them, or where slots come in token blocks for as many
    // of the first as fill whole ones. Fewer where no more are free.
    std::vector<int> claim(std::span<const Token> tokens);
    // First slot of a free block, whose slots are put() by the caller, for tokens of the sequences of `mask`. The lowest; or, of slots that come
    // alone, beside other sequences one in a run that the first of these has to itself, as far as there are such runs: kernels that attend to
    // one sequence then read few slots of others. Precondition: n_free() > 0.
    int find_free(uint64_t mask);
    // The lowest in any case.
    int lowest_free();
    // A given slot holds this token now, whatever it held; without sequences it is free.
    void put(int slot, const Token& token);
    void release(int slot) { put(slot, {-1, 0}); }
    void clear();

    // Moves of tokens by which n more token blocks become free, as far as that is possible: out of the blocks that have the fewest left,
    // into as few of these. By first sequence and position; targets in whole blocks, the last perhaps with fewer.
    std::vector<SlotMove> merges(int n) const;
    void merge(std::span<const SlotMove> moves);
    // A token goes to a free slot, of those that come alone.
    void move(const SlotMove& move);

    // Steps of step_slots slots whose tokens are others than they were when n_changes() was `since`.
    std::vector<int32_t> changed_steps(uint64_t since) const;
    uint64_t n_changes() const { return n_changes_; }

    static size_t bytes_per_slot() { return sizeof(int32_t) + sizeof(uint64_t); }

    // How many cells all calls so far have looked at: the work that may grow with the context.
    uint64_t n_visited() const { return n_visited_; }

private:
    // What a sequence holds. Where `exact` is false, its tokens lie between first and last, which may be gone.
    struct Holding {
        int32_t first = -1;
        int32_t last = -1;
        int count = 0;
        int newest = -1;       // slot of the last position, -1: unknown
        bool gapless = false;  // every position from first to last, once
        bool exact = true;
    };

    const Holding& holding(int seq) const { return holdings_[static_cast<size_t>(seq)]; }
    void add(int seq, int32_t pos, int slot);
    void remove(int seq, int32_t pos);
    void scan(int seq) const;  // makes a holding exact
    void occupy(int slot);     // after a slot has changed
    // Where the sequence's last run goes on, or else a run begins; -1: nowhere.
    int find_in_run(int seq);
    int& remembered(int seq, int32_t pos) const {
        return remembered_[static_cast<size_t>((pos + 61 * seq) % n_remembered_)];  // sequences begin alike
    }
    // Remembers a sequence's positions from `first` on, as many as there is room for.
    void remember(int seq, int32_t first) const;
    // Slots of a sequence's n positions from `pos` on, or, with step -1, back from it; fewer where one is not remembered.
    std::vector<int> find(int seq, int32_t pos, int n, int step) const;

    std::vector<int32_t> pos_;
    std::vector<uint64_t> seq_;
    mutable std::array<Holding, max_sequences> holdings_{};
    mutable uint64_t n_visited_ = 0;
    uint64_t sequences_ = 0;
    mutable std::vector<int> remembered_;  // by sequence and position: where it may be
    int capacity_;
    int limit_;
    int block_;
    int n_remembered_;
    std::vector<uint64_t> occupied_;  // a bit for every block with a used slot
    int n_blocks_ = 0;                // such blocks
    std::vector<uint64_t> changes_;   // of every step, n_changes_ at its last one
    uint64_t n_changes_ = 0;
    int n_used_ = 0;
    int end_ = 0;
    size_t first_free_ = 0;   // no block below that of this word is free
    size_t first_empty_ = 0;  // no run below this one is without a used slot
};

}  // namespace lkv
