#include "cache/cells.h"

#include <algorithm>

namespace lkv {

int Cells::claim(int32_t pos, uint64_t seq_mask) {
    int slot = first_free_;
    while (used(slot)) {
        slot++;
    }
    place(slot, pos, seq_mask);
    first_free_ = slot + 1;
    return slot;
}

void Cells::place(int slot, int32_t pos, uint64_t seq_mask) {
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
    n_used_ = end_ = first_free_ = 0;
}

}  // namespace lkv
