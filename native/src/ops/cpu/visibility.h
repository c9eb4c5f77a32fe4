// Which slots of a tile a query token sees: one bit per slot.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ops/cpu/tile.h"
#include "ops/latent_attn.h"

namespace lkv {

// Summarised once per tile, so that most (token, tile) pairs of a prefill are decided by a few comparisons.
class TileVisibility {
public:
    TileVisibility(const RegionView& region, int first, int32_t window) : window_(window) {
        const int n = std::min(tile_slots, region.n_slots - first);
        // in registers: every layer of a decoded token comes by here, for every slot
        uint64_t used = 0;
        uint64_t any_seq = 0;
        uint64_t every_seq = ~uint64_t{0};
        int32_t min_pos = std::numeric_limits<int32_t>::max();
        int32_t max_pos = -1;
        for (int i = 0; i < n; i++) {
            const int32_t pos = region.pos[first + i];
            const bool use = pos >= 0 && region.seq[first + i] != 0;
            const uint64_t seq = use ? region.seq[first + i] : 0;
            used |= uint64_t{use} << i;
            any_seq |= seq;
            every_seq &= use ? seq : ~uint64_t{0};
            min_pos = std::min(min_pos, use ? pos : std::numeric_limits<int32_t>::max());
            max_pos = std::max(max_pos, use ? pos : -1);
            pos_[i] = use ? pos : 0;
            seq_[i] = seq;
        }
        used_ = used;
        any_seq_ = any_seq;
        every_seq_ = every_seq;
        min_pos_ = min_pos;
        max_pos_ = max_pos;
    }

    uint64_t slots(int32_t seq, int32_t pos) const {
        const uint64_t bit = uint64_t{1} << seq;
        const int64_t oldest = window_ > 0 ? int64_t{pos} - window_ + 1 : 0;
        if (!(any_seq_ & bit) || min_pos_ > pos || max_pos_ < oldest) return 0;
        if ((every_seq_ & bit) && max_pos_ <= pos && min_pos_ >= oldest) return used_;
        uint64_t mask = 0;
        for (int i = 0; i < tile_slots; i++) {
            const bool sees = (seq_[i] & bit) && pos_[i] <= pos && pos_[i] >= oldest;
            mask |= uint64_t{sees} << i;
        }
        return mask;
    }

    const int32_t* positions() const { return pos_; }  // [64], 0 where there is no token

private:
    int32_t window_;
    uint64_t used_;
    uint64_t any_seq_;
    uint64_t every_seq_;
    int32_t min_pos_;
    int32_t max_pos_;
    int32_t pos_[tile_slots] = {};
    uint64_t seq_[tile_slots] = {};
};

}  // namespace lkv
