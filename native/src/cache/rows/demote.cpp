// How rows of recent tokens become rows of the middle, on the host, and how broken token blocks become whole ones.
#include <algorithm>
#include <array>

#include "cache/rows/rows.h"

namespace lkv {

// K or V of these recent slots as the middle stores it, before any format: [slots, width].
std::vector<float> Rows::middle_values(int layer, bool value_side, std::span<const int> slots) const {
    const RowLayout& from = layout(recent_, layer, value_side);
    const auto width = static_cast<size_t>(from.width);
    std::vector<float> rows(slots.size() * width);
    for (size_t i = 0; i < slots.size(); i++)
        read_row(from, row(recent_, layer, value_side, slots[i]), &rows[i * width]);
    std::vector<float> z(slots.size() * static_cast<size_t>(layout(middle_, layer, value_side).width));
    encoder_->encode(layer, value_side, rows, static_cast<int>(slots.size()), z);
    return z;
}

// Full rows of K or V into single rows of the middle.
void Rows::encode(int layer, bool value_side, std::span<const RowMove> moves) const {
    const RowLayout& to = layout(middle_, layer, value_side);
    std::vector<int> slots;
    for (const RowMove& move : moves) slots.push_back(move.from);
    const std::vector<float> z = middle_values(layer, value_side, slots);
    const float* values = z.data();
    for (const RowMove& move : moves) {
        write_row(to, values, row(middle_, layer, value_side, move.to));
        values += to.width;
    }
}

// K into blocks, 32 moves each.
void Rows::move_to_token_blocks(int layer, std::span<const RowMove> moves) const {
    const RowLayout& to = k_layout(middle_, layer);
    for (size_t first = 0; first < moves.size(); first += token_block_slots) {
        std::array<int, token_block_slots> slots;
        std::array<const uint8_t*, token_block_slots> rows;
        for (size_t i = 0; i < rows.size(); i++) {
            slots[i] = moves[first + i].from;
            rows[i] = k_row(recent_, layer, slots[i]);
        }
        uint8_t* const block = k_row(middle_, layer, moves[first].to);
        if (is_full(recent_, layer)) {
            write_token_block(to, middle_values(layer, false, slots).data(), block);
        } else {
            move_token_block(k_layout(recent_, layer), rows.data(), to, block);
        }
    }
}

void Rows::demote(int layer, std::span<const RowMove> moves) {
    if (moves.empty() || !has_rows(layer)) return;
    for (const bool value_side : {false, true}) {
        if (!has_side(layer, value_side)) continue;
        const RowLayout& from = layout(recent_, layer, value_side);
        const RowLayout& to = layout(middle_, layer, value_side);
        if (in_token_blocks(to)) {
            move_to_token_blocks(layer, moves);
        } else if (is_full(recent_, layer)) {
            encode(layer, value_side, moves);
        } else {
            for (const RowMove& move : moves) {
                move_rows(from, row(recent_, layer, value_side, move.from), to,
                          row(middle_, layer, value_side, move.to));
            }
        }
    }
}

void Rows::move_recent(int layer, std::span<const SlotMove> moves) const {
    if (!has_rows(layer)) return;
    for (const bool value_side : {false, true}) {
        const auto bytes = static_cast<size_t>(layout(recent_, layer, value_side).row_bytes);
        for (const SlotMove& move : moves) {
            std::copy_n(row(recent_, layer, value_side, move.from), bytes, row(recent_, layer, value_side, move.to));
        }
    }
}

// It is rare, and rows of a GPU come and go for it.
void Rows::merge(std::span<const SlotMove> moves) {
    const RegionRows& region = regions_[static_cast<size_t>(middle_)];
    std::vector<int> from;
    std::vector<int> to;
    std::vector<int> blocks;  // all of their slots: any of them has some of the block's scales
    for (const SlotMove& move : moves) {
        from.push_back(move.from);
        to.push_back(move.to);
        const int first = move.from / token_block_slots * token_block_slots;
        if (blocks.empty() || std::find(blocks.begin(), blocks.end(), first) == blocks.end()) {
            for (int i = 0; i < token_block_slots; i++) blocks.push_back(first + i);
        }
    }
    const std::vector<ByteRange> ranges = region.ranges_of(blocks, 0);
    HostBytes bytes(*region.storage, region.total_bytes());
    bytes.read(ranges);
    for (const LayerRows& layer : region.layers) {
        for (int side = 0; region.has_row(layer) && side < 2; side++) {
            regroup_rows(layer.layout[side], bytes.data() + layer.offset[side], layer.page[side], from, to);
        }
    }
    bytes.write_back(ranges);
}

}  // namespace lkv
