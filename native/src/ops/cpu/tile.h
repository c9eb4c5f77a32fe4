// A tile is 64 slots of a region: which of them a query sees, where their rows lie, and the values of one group of channels in f32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cache/formats/channel.h"
#include "cache/region_view.h"

namespace lkv {

constexpr int tile_slots = 64;

// Which slots of a tile a query token sees, one bit per slot. Summarised once per tile, so that most (token, tile) pairs of a
// prefill are decided by a few comparisons.
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

// Where the rows of a tile's slots lie.
struct TileRows {
    const uint8_t* slot[tile_slots];
    const uint8_t* block[tile_slots / token_block_slots];  // first row of each block; null where no slot of it is seen

    // rows: of the tile's first slot. seen: a bit for every slot of the tile. Slots that are not seen point at zero_row, zero bytes that
    // every format reads as finite values.
    void find(const uint8_t* rows, int64_t row_bytes, uint64_t seen, const uint8_t* zero_row) {
        for (int s = 0; s < tile_slots; s++) {
            slot[s] = seen >> s & 1 ? rows + s * row_bytes : zero_row;
        }
        for (int b = 0; b < tile_slots / token_block_slots; b++) {
            const int s = b * token_block_slots;
            const bool use = seen >> s & ((uint64_t{1} << token_block_slots) - 1);
            block[b] = use ? rows + s * row_bytes : nullptr;
        }
    }
};

// Prefetches, front to back, the bytes that the next tile will read, as many as are being read now. Heads pick 64 to 128
// bytes out of each row, so the processor sees strides, guesses nothing and waits; memory wants the rows in order.
class ReadAhead {
public:
    ReadAhead() = default;
    ReadAhead(const uint8_t* begin, int64_t bytes) : at_(begin), end_(begin + bytes) {}

    void pull(int bytes) {
        if (at_ >= end_) return;
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at_ + i);
        at_ += bytes;
    }

private:
    const uint8_t* at_ = nullptr;
    const uint8_t* end_ = nullptr;
};

// The values of a group in a tile, in panels of 16 columns (gemm.h):
//   by channel   [slot / 16][channel][slot % 16]     K, and latents that get rebuilt: columns are slots
//   by slot      [channel / 16][slot][channel % 16]  V: columns are channels, the last panel padded with zeros

// dst: [4][kept][16].
void load_by_channel(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, float* dst);

// dst: [ceil(kept / 16)][64][16]. Not for formats of token blocks.
void load_by_slot(const RowLayout& layout, const GroupLayout& group, const TileRows& rows, float* dst);

}  // namespace lkv
