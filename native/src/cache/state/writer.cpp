#include "cache/state/writer.h"

#include <array>

#include "cache/state/kept.h"
#include "cache/state/recurrent.h"
#include "cache/state/saved_state.h"

namespace lkv {
namespace {

// The region's head, and these slots: those whose tokens `mask` does not hold at these positions are empty.
void put_region(const RegionRows& region, const Cells& cells, const uint8_t* rows, uint64_t mask,
                const Positions& positions, std::span<const int> slots, ByteWriter& out) {
    put_name(out, region.name);
    out.put(static_cast<uint32_t>(region.layers.size()));
    out.put(static_cast<uint32_t>(slots.size()));
    for (const LayerRows& layer : region.layers) {
        for (const RowLayout& row : layer.layout) put_layout(out, region.has_row(layer) ? row : RowLayout{});
    }
    for (const int slot : slots) {
        const uint64_t seq = positions.have(cells.pos(slot)) ? cells.seq(slot) & mask : 0;
        out.put(static_cast<int32_t>(slot));
        out.put(seq != 0 ? cells.pos(slot) : -1);
        out.put(seq);
        for (const LayerRows& layer : region.layers) {
            if (region.has_row(layer)) put_rows(layer, rows, slot, out);
        }
    }
}

}  // namespace

std::vector<uint8_t> StateWriter::all() const { return parts(all_sequences, std::array{Positions{}}).front(); }

std::vector<uint8_t> StateWriter::sequence(int seq) const { return sequence(seq, std::array{0}).front(); }

std::vector<std::vector<uint8_t>> StateWriter::sequence(int seq, std::span<const int32_t> cuts) const {
    std::vector<Positions> between;
    for (size_t i = 0; i < cuts.size(); i++) {
        between.push_back({cuts[i], i + 1 < cuts.size() ? cuts[i + 1] : Positions{}.end});
        if (between.back().first < 0 || between.back().first >= between.back().end) {
            fail("state", "expected cuts at rising positions of 0 or more; got ", cuts[i]);
        }
    }
    const bool is_whole = between.size() == 1 && between.front().first == 0;
    if (between.empty() || (placement_.eviction() != nullptr && !is_whole)) {
        fail("state", "expected at least one part, and under eviction one alone from position 0; got ", between.size());
    }
    return parts(bit(seq), between);
}

std::vector<std::vector<uint8_t>> StateWriter::parts(uint64_t mask, std::span<const Positions> parts) const {
    std::vector<ByteWriter> out(parts.size());
    for (ByteWriter& part : out) put_head(mask, part);
    put_regions(mask, parts, out);
    put_ring(mask, out);
    put_kept(options_, placement_, rows_, mask, out.back());
    for (size_t i = 0; i < parts.size(); i++) put_recurrent(states_, mask & placement_.sequences(), parts[i], out[i]);
    std::vector<std::vector<uint8_t>> saved;
    for (ByteWriter& part : out) saved.push_back(part.take());
    return saved;
}

void StateWriter::put_head(uint64_t mask, ByteWriter& out) const {
    out.put(state_magic);
    out.put(state_version);
    out.put(placement_.sequences() & mask);
    out.put(static_cast<uint32_t>(rows_.regions().size()));
    put_name(out, placement_.policy_name());
    out.put(static_cast<uint32_t>(options_.evict.keep));
}

void StateWriter::put_regions(uint64_t mask, std::span<const Positions> parts, std::span<ByteWriter> out) const {
    for (int r = 0; r < placement_.n_regions(); r++) {
        const RegionRows& region = rows_.regions()[static_cast<size_t>(r)];
        const Cells& cells = placement_.cells(r);
        std::vector<std::vector<int>> slots;
        std::vector<int> all;
        for (const Positions& part : parts) {
            slots.push_back(cells.blocks_of(mask, part));
            all.insert(all.end(), slots.back().begin(), slots.back().end());
        }
        HostBytes rows = region.host_bytes();
        rows.read(region.ranges_of(all, most_read_between));
        for (size_t i = 0; i < parts.size(); i++) {
            put_region(region, cells, rows.data(), mask, parts[i], slots[i], out[i]);
        }
    }
}

void StateWriter::put_ring(uint64_t mask, std::span<ByteWriter> out) const {
    if (placement_.ring() == nullptr) return;
    const Ring& ring = *placement_.ring();
    const Cells& cells = ring.cells();
    std::vector<int> slots = cells.blocks_of(mask);
    if (mask != all_sequences) {  // of one what its next token sees: a ring that others share may have no room for more
        std::erase_if(slots, [&](int slot) { return !ring.is_seen_again(placement_, {cells.pos(slot), mask}); });
    }
    const RegionRows& region = rows_.regions().back();
    HostBytes rows = region.host_bytes();
    rows.read(region.ranges_of(slots, most_read_between));
    for (ByteWriter& part : out) {
        const bool is_last = &part == &out.back();
        put_region(region, cells, rows.data(), mask, {}, is_last ? std::span<const int>(slots) : std::span<const int>(),
                   part);
    }
}

}  // namespace lkv
