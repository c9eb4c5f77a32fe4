#include "cache/cells.h"

#include <algorithm>

namespace lkv {

void Cells::allocate() {
    pos_.assign(static_cast<size_t>(capacity_), -1);
    seq_.assign(static_cast<size_t>(capacity_), 0);
}

int Cells::claim(int32_t pos, uint64_t seq_mask) {
    int slot = first_free_;
    while (used(slot)) {
        slot++;
    }
    place(slot, pos, seq_mask);
    first_free_ = slot + 1;
    return slot;
}

int Cells::find_block() {
    int slot = first_free_ / block_ * block_;
    while (block_used(slot)) {
        slot += block_;
    }
    first_free_ = slot;
    return slot;
}

bool Cells::block_used(int slot) const {
    const auto first = seq_.begin() + slot / block_ * block_;
    return std::any_of(first, first + block_, [](uint64_t mask) { return mask != 0; });
}

void Cells::place(int slot, int32_t pos, uint64_t seq_mask) {
    if (block_ > 1 && !block_used(slot)) {
        n_blocks_++;
    }
    pos_[static_cast<size_t>(slot)] = pos;
    seq_[static_cast<size_t>(slot)] = seq_mask;
    end_ = std::max(end_, slot + 1);
    n_used_++;
}

void Cells::release(int slot) {
    if (!used(slot)) {
        return;
    }
    pos_[static_cast<size_t>(slot)] = -1;
    seq_[static_cast<size_t>(slot)] = 0;
    first_free_ = std::min(first_free_, slot);
    n_used_--;
    if (block_ > 1 && !block_used(slot)) {
        n_blocks_--;
    }
    while (end_ > 0 && !used(end_ - 1)) {
        end_--;
    }
}

void Cells::set_seq(int slot, uint64_t mask) {
    if (mask == 0) {
        release(slot);
    } else {
        seq_[static_cast<size_t>(slot)] = mask;
    }
}

void Cells::clear() {
    std::fill(pos_.begin(), pos_.end(), -1);
    std::fill(seq_.begin(), seq_.end(), 0);
    n_used_ = n_blocks_ = end_ = first_free_ = 0;
}

}  // namespace lkv
