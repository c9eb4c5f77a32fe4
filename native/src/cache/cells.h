// Which token each slot of a region holds: slot <-> position <-> sequences. Knows nothing of bytes or layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lkv {

constexpr int max_sequences = 64;  // one bit each in a slot's mask

class Cells {
public:
    explicit Cells(int n_slots) : pos_(static_cast<size_t>(n_slots), -1), seq_(static_cast<size_t>(n_slots), 0) {}

    int capacity() const { return static_cast<int>(pos_.size()); }
    int n_used() const { return n_used_; }
    int n_free() const { return capacity() - n_used_; }
    int end() const { return end_; }  // one past the highest used slot
    bool used(int slot) const { return seq_[static_cast<size_t>(slot)] != 0; }

    const int32_t* pos_data() const { return pos_.data(); }
    const uint64_t* seq_data() const { return seq_.data(); }
    int32_t pos(int slot) const { return pos_[static_cast<size_t>(slot)]; }
    uint64_t seq(int slot) const { return seq_[static_cast<size_t>(slot)]; }

    // Lowest free slot, now held by the sequences in `seq_mask` at position `pos`. Precondition: n_free() > 0.
    int claim(int32_t pos, uint64_t seq_mask);
    void place(int slot, int32_t pos, uint64_t seq_mask);  // a given free slot, as claim() would take it
    void release(int slot);
    void set_seq(int slot, uint64_t mask);  // mask 0 releases
    void shift(int slot, int32_t delta) { pos_[static_cast<size_t>(slot)] += delta; }
    void clear();

    static size_t bytes_per_slot() { return sizeof(int32_t) + sizeof(uint64_t); }

private:
    std::vector<int32_t> pos_;
    std::vector<uint64_t> seq_;
    int n_used_ = 0;
    int end_ = 0;
    int first_free_ = 0;  // no free slot lies below
};

}  // namespace lkv
