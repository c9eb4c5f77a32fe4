// What recurrent layers keep of a sequence: one state of fixed size, however long the sequence is. It knows slots and positions, and not
// what a state means.
//
// A state cannot be undone token by token. So a sequence keeps snapshots of earlier ones, from each of which it can go on: in slots of the
// device the state before its last ubatch and those between the guesses of that, and copies in the host's memory of states after prompts.
//
// A ubatch reads its sequences' slots and writes others, which become the sequences' own when it has run: a failure changes nothing.
// Sequences that share their tokens share slots.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache/placement/sequences.h"
#include "cache/recurrent/state_memory.h"

namespace lkv {

class SequenceState {
public:
    // The states of a sequence after its token at position `end - 1`.
    struct Snapshot {
        int32_t end = 0;
        int slot = -1;                                       // of every memory; -1: in `copy` alone
        std::vector<std::shared_ptr<const StateCopy>> copy;  // of every memory; none: in the slot alone

        bool is_copied() const { return !copy.empty(); }
    };

    static constexpr int slots_of_sequence = 2;   // its own, and the one before its last ubatch; guesses take more
    static constexpr int copies_of_sequence = 4;  // the most in the host's memory

    // slot_bytes: of all memories. 0: the model has no recurrent layer, and none of this matters. n_guesses: the last tokens of a ubatch
    // that can be taken back one by one.
    SequenceState(int n_seq_max, size_t slot_bytes, int n_guesses = 0);
    // Before the first claim(): the memories of all devices, in the order of their layers. They outlive this.
    void attach(std::vector<StateMemory*> memories) { memories_ = std::move(memories); }

    bool is_used() const { return slot_bytes_ > 0; }
    size_t slot_bytes() const { return slot_bytes_; }
    int n_slots() const { return static_cast<int>(uses_.size()); }

    // The slots of a ubatch: for each of its sequences the one that is read and the one that is written.
    struct Step {
        std::vector<int32_t> from;
        std::vector<int64_t> to;  // of all sequences the last state, then of all the one before it, …
        std::vector<int32_t> seq;
        int n_states() const { return seq.empty() ? 1 : static_cast<int>(to.size() / seq.size()); }
    };
    // n_guesses: at the end of each sequence's tokens so many are guesses, of which some may be taken back.
    Step claim(std::span<const int32_t> seq, int n_guesses = 0);
    // The ubatch has run; ends: positions after each sequence's last token.
    void commit(const Step& step, std::span<const int32_t> ends);
    void abandon(const Step& step);
    // Copies the sequence's present state to the host.
    void keep_copy(int seq);

    // Position after the last token that the sequence's state has seen.
    int32_t end(int seq) const;
    int32_t since_copy(int seq) const;  // tokens after its last copy
    // The largest such position, at most `limit`, of a snapshot; 0: only the beginning.
    int32_t resumable(int seq, int32_t limit) const;
    bool has(int seq, int32_t end) const { return resumable(seq, end) == end; }
    // Goes back to a snapshot. end: one that has() is true of.
    void rewind(int seq, int32_t end);
    // dst goes on from a snapshot of src, in place of its own. end: one that has() is true of in src.
    void copy(int src, int dst, int32_t end);
    void remove(int seq) { rewind(seq, 0); }
    void clear();

    // For states: what sequences have, earliest first; and its bytes.
    std::span<const Snapshot> snapshots(int seq) const { return kept_[static_cast<size_t>(seq)]; }
    std::vector<uint8_t> bytes(const Snapshot& snapshot) const;
    size_t n_copies() const;  // in the host's memory; sequences that share one count it once
    // After those that the sequence has. bytes: [slot_bytes()]
    void put(int seq, int32_t end, const uint8_t* bytes);

private:
    std::vector<Snapshot>& of(int seq) { return kept_[static_cast<size_t>(seq)]; }
    int claim_slot();
    int source_of(int seq);
    void release(const Snapshot& snapshot);
    void drop_slots_before_last(int seq);
    void thin_out(std::vector<Snapshot>& kept);

    size_t slot_bytes_;
    std::vector<StateMemory*> memories_;
    int n_guesses_;
    std::vector<int> uses_;                    // of every slot, by snapshots and a ubatch that runs
    std::vector<std::vector<Snapshot>> kept_;  // of every sequence, earliest first; the last is what it has now
};

}  // namespace lkv
