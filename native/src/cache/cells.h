// Which token each slot of a region holds: slot <-> position <-> sequences. Knows nothing of bytes or layers.
//
// A region may take tokens in blocks of slots only. A block is claimed whole; tokens leave it one by one, and when the
// last is gone the block is free again: until then its empty slots are occupied but unused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lkv {

constexpr int max_sequences = 64;  // one bit each in a slot's mask

class Cells {
public:
    // block: slots that are claimed together, 1 = each alone; divides n_slots.
    explicit Cells(int n_slots, int block = 1) : capacity_(n_slots), block_(block) {}
    void allocate();  // before the first claim; until then every slot is free, and none costs memory

    int block() const { return block_; }
    int capacity() const { return capacity_; }
    int n_used() const { return n_used_; }
    int n_occupied() const { return block_ == 1 ? n_used_ : n_blocks_ * block_; }
    int n_free() const { return capacity() - n_occupied(); }
    int end() const { return end_; }  // one past the highest used slot
    bool block_used(int slot) const;  // whether a slot of this slot's block is used
    bool used(int slot) const { return seq_[static_cast<size_t>(slot)] != 0; }

    const int32_t* pos_data() const { return pos_.data(); }
    const uint64_t* seq_data() const { return seq_.data(); }
    int32_t pos(int slot) const { return pos_[static_cast<size_t>(slot)]; }
    uint64_t seq(int slot) const { return seq_[static_cast<size_t>(slot)]; }

    // Lowest free slot, now held by the sequences in `seq_mask` at position `pos`. Precondition: n_free() > 0.
    // And: block() is 1.
    int claim(int32_t pos, uint64_t seq_mask);
    // First slot of the lowest free block; its slots are place()d by the caller. Precondition: n_free() > 0.
    int find_block();
    void place(int slot, int32_t pos, uint64_t seq_mask);  // a given free slot, as claim() would take it
    void release(int slot);
    void set_seq(int slot, uint64_t mask);  // mask 0 releases
    void shift(int slot, int32_t delta) { pos_[static_cast<size_t>(slot)] += delta; }
    void clear();

    static size_t bytes_per_slot() { return sizeof(int32_t) + sizeof(uint64_t); }

private:
    std::vector<int32_t> pos_;
    std::vector<uint64_t> seq_;
    int capacity_;
    int block_;
    int n_blocks_ = 0;  // blocks with a used slot; counted where block_ > 1
    int n_used_ = 0;
    int end_ = 0;
    int first_free_ = 0;  // no slot that may be claimed lies below
};

}  // namespace lkv
