// Which slot holds which position of which sequence. Knows cells, and nothing of rows or bytes.
//
//   region   tokens
//   sink     the first `sink` of a sequence
//   recent   at least the latest `recent`
//   middle   all others
//
// A token lives in exactly one region. New tokens enter sink or recent (middle when the cache keeps no recent tokens) and
// are demoted from recent to middle in batches. Where the middle takes token blocks only, a batch is 32 tokens of one sequence,
// and fewer wait in recent.
//
// The middle's cells say which tokens there are. Some layers may keep a selection of them: those of a sliding window (ring.h), or
// those that eviction leaves (eviction.h).
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache/placement/arena.h"
#include "cache/placement/eviction.h"
#include "cache/placement/options.h"
#include "cache/placement/ring.h"

namespace lkv {

class Journal;

class Placement {
public:
    // Slots of each region; 0: there is none. block: slots of the middle that are claimed together.
    struct Sizes {
        int sink;
        int recent;
        int middle;
        int block;
    };
    Placement(const PlacementOptions& options, const Sizes& sizes, int n_layers);
    void select(std::unique_ptr<Ring> ring, const std::vector<bool>& in_layer);
    void select(std::unique_ptr<Eviction> eviction, const std::vector<bool>& in_layer);
    void share(const Arena& arena);  // recent and middle lie in this memory
    void allocate();                 // before the first claim

    const PlacementOptions& options() const { return options_; }
    int n_regions() const { return static_cast<int>(regions_.size()); }
    int n_layers() const { return static_cast<int>(of_layer_.size()); }
    int middle() const { return n_regions() - 1; }
    int sink() const { return sink_; }      // -1: there is none
    int recent() const { return recent_; }  // -1: there is none
    const Ring* ring() const { return ring_.get(); }
    const Eviction* eviction() const { return eviction_.get(); }
    Eviction* eviction() { return eviction_.get(); }
    const char* policy_name() const { return eviction_ == nullptr ? "none" : eviction_->policy().name; }
    bool in_ring(int layer) const { return ring_ != nullptr && of_layer_[static_cast<size_t>(layer)] == ring_.get(); }
    bool evicts(int layer) const {
        return eviction_ != nullptr && of_layer_[static_cast<size_t>(layer)] == eviction_.get();
    }
    const Cells& cells(int region) const { return regions_[static_cast<size_t>(region)]; }
    const Cells& cells(int region, int layer) const;
    const Cells& cells_of_rows(int region) const {  // as Rows counts regions, the ring last
        return region == n_regions() ? ring_->cells() : cells(region);
    }
    int n_used() const;  // tokens, each counted once
    bool takes_blocks() const { return cells(middle()).block() > 1; }
    uint64_t n_visited() const;  // Cells::n_visited of all cells
    // Changes whenever cells change, except when claim() takes free ones: a copy of the cells is stale then.
    uint64_t version() const { return version_; }

    // Where a token's row of this layer is; slot -1: there is none, as no query of the layer sees the token again.
    SlotRef row_of(const SlotRef& at, int layer) const;
    // Moves that have a row in this layer, to where it is there.
    std::vector<RowMove> moves_of(int layer, std::span<const RowMove> moves) const;

    // Errors: Error for a sequence out of range.
    void check_seq(int seq) const;
    // Errors: Error when fewer than n cells are free.
    void check_room(size_t n) const;
    // Slots for new tokens, whose positions must be new in their sequence. Tokens that settle in token blocks lie there in the order of
    // their positions. With a ring, tokens that do not settle are at most a ubatch. Errors: Error where there is no room, in the recent
    // region too if the middle takes token blocks only. The cache is then as it was.
    std::vector<SlotRef> claim(const NewTokens& tokens);
    // Undoes the last claim(). Tokens that were evicted for it stay evicted.
    void take_back(std::span<const SlotRef> slots);
    // How many blocks of the middle claim() takes for these tokens, where it takes blocks. It finds no room where fewer are free.
    int n_blocks(const NewTokens& tokens) const;

    // What is no longer recent, once a sequence has a batch more than its window: slots, by the first sequence that holds them, so that
    // tokens which several share fill blocks with that one's own; and only whole blocks, where the middle takes these. Empty: nothing.
    // Guesses push nothing out. Precondition: there are recent tokens.
    using Leaving = std::vector<std::vector<int>>;
    Leaving due(const Guesses& guesses) const;
    int n_blocks(const Leaving& due) const;
    // Slots of the middle for them. The tokens are in both until leave_recent().
    std::vector<RowMove> demote(const Leaving& due);
    void leave_recent(std::span<const RowMove> moves);

    // Where recent and middle share memory, tokens stay exact while there is room (tiers.cpp). What leaves depends on counts of tokens alone.
    bool has_tiers() const { return arena_.is_shared(); }
    bool fit(int exact_end, int middle_end) const { return exact_end <= arena_.exact_beside(middle_end + reserve); }
    const Arena& arena() const { return arena_; }
    // The most new tokens that can enter recent at once, once what may leave has left, while so many others settle.
    int most_exact(int n_settling = 0) const;
    // By how many exact tokens there are too many for n_exact new ones and for n_settling in the middle; below 0: so many fit beside.
    int excess(int n_exact, int n_settling, const Guesses& guesses) const;
    // That leave at once for it: as many as find room in the middle once the others are gathered.
    int n_leaving(int excess) const;
    static constexpr int reserve = page_slots;  // slots of the middle that are free for what leaves next
    int spare() const { return spare_; }        // exact slots that are free after a step
    // At least n of the oldest exact tokens outside of windows, as due(): those of idle sequences first, then of the longest ones.
    Leaving oldest(int n, const Guesses& guesses) const;
    // Moves out of the exact pages that the middle needs next, or for n_settling tokens; gather(moves) makes them.
    std::vector<SlotMove> gather(int n_settling) const;
    void gather(std::span<const SlotMove> moves);
    // How far regions may grow now.
    void limit_cells();
    // How many tokens of a single sequence of n_tokens are exact at least.
    int exact_of(int n_tokens) const;

    // llama.cpp's sequence verbs. They are refused, and change nothing, where a sequence's next token would see tokens in its window whose
    // rows have left the ring; and under eviction where a part of a sequence would go, move or be lent, while what was evicted had been
    // chosen with all of it. remove() returns false then. Errors: Error for a sequence out of range; of copy() and shift() where they are
    // refused.
    [[nodiscard]] bool remove(int seq, const Positions& positions = {});  // seq < 0: every sequence
    void copy(int src, int dst, const Positions& positions);
    void shift(int seq, const Positions& positions, int32_t delta);
    void keep(int seq);
    void clear();
    uint64_t sequences() const;    // mask of those that have tokens
    int32_t first(int seq) const;  // position, -1: it has no tokens
    int32_t last(int seq) const;
    int32_t last_before(int seq, int32_t end) const;  // the last position below `end`, -1: none
    // The position before which tokens of the sequence stay where they are, whatever follows, or are exact without being in its window. Under
    // eviction 0.
    int32_t settled(int seq) const;

    // Moves within the middle by which so many of its blocks are free, as far as that is possible; merge() makes them.
    std::vector<SlotMove> merges(int n_blocks) const;
    void merge(std::span<const SlotMove> moves);

    // For states, which say themselves where tokens are.
    Cells& cells_of_rows(int region) {
        return region == n_regions() ? ring_->cells() : regions_[static_cast<size_t>(region)];
    }
    Ring* ring() { return ring_.get(); }
    void remove_whole(int seq);  // whatever it leaves of others
    bool is_complete(uint64_t sequences) const;
    void changed() {
        version_++;
        upcoming_.assign(max_sequences, {});
    }

private:
    void serve(Selection* selection, const std::vector<bool>& in_layer);  // these layers have its tokens
    void place(const NewTokens& tokens, std::vector<SlotRef>& slots);
    void release(const SlotRef& at);
    [[noreturn]] void refuse_recent(size_t n_wanted) const;
    std::vector<int> old_slots(const Guesses& guesses) const;
    std::vector<int32_t> first_recent(const NewTokens& tokens) const;
    int32_t first_exact(int seq, int32_t n_guesses) const;  // of a sequence's window
    void find_upcoming() const;
    std::vector<int> exact_slots(int seq, const Positions& positions) const;
    bool takes_part(int seq, const Positions& positions) const;
    bool is_divisible() const;  // whether parts of sequences may go, move or be lent
    template <typename F>
    void each_cells(F&& visit);  // that tokens are removed from, copied and shifted in
    void take_out(int seq, const Positions& positions, Journal& journal);
    bool keeps(Journal& journal);
    [[noreturn]] void refuse(const char* verb, const std::string& got) const;

    PlacementOptions options_;
    std::vector<Cells> regions_;
    int sink_ = -1;
    int recent_ = -1;
    std::unique_ptr<Ring> ring_;
    std::unique_ptr<Eviction> eviction_;
    std::vector<Selection*> selections_;
    std::vector<Selection*> of_layer_;  // null: the layer keeps every token
    uint64_t version_ = 0;
    Arena arena_;
    int spare_ = 0;
    // Exact tokens of a sequence outside of its window, by position: those before `end` are all here, some of which may have left.
    struct Upcoming {
        std::vector<std::pair<int32_t, int>> tokens;  // position, slot
        int32_t end = 0;
    };
    mutable std::vector<Upcoming> upcoming_ = std::vector<Upcoming>(max_sequences);
    uint64_t n_claimed_ = 0;                                                      // tokens so far
    std::vector<uint64_t> claimed_at_ = std::vector<uint64_t>(max_sequences, 0);  // n_claimed_ at a sequence's last
};

}  // namespace lkv
