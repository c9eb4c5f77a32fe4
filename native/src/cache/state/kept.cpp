#include "cache/state/kept.h"

#include <bit>

namespace lkv {
namespace {

std::vector<int> evicting_layers(const Placement& placement) {
    std::vector<int> layers;
    for (int il = 0; il < placement.n_layers(); il++) {
        if (placement.evicts(il)) layers.push_back(il);
    }
    return layers;
}

void put_token(const Cells& cells, int slot, uint64_t mask, ByteWriter& out) {
    out.put(cells.pos(slot));
    out.put(cells.seq(slot) & mask);
}

const LayerRows& middle_rows(const Rows& rows, int layer) {
    return rows.regions()[static_cast<size_t>(rows.middle())].layers[static_cast<size_t>(layer)];
}

void get_sequences(ByteReader& in, int to_seq, Placement& placement) {
    const PlacementOptions& options = placement.options();
    const auto n = in.get<uint32_t>();
    if (to_seq >= 0 && n != 1)
        fail("state", "expected how many tokens of one sequence were decoded; got ", n, " numbers");
    for (uint32_t i = 0; i < n; i++) {
        const auto seq = in.get<int32_t>();
        const auto n_decoded = in.get<int32_t>();
        if (seq < 0 || seq >= max_sequences || n_decoded < 0 || n_decoded > Eviction::most_decoded) {
            fail("state", "expected a sequence and how many of its tokens were decoded; got ", seq, " and ", n_decoded);
        }
        const int to = to_seq < 0 ? seq : to_seq;
        if (const int32_t newest = to < options.n_seq_max ? placement.last(to) : -1; newest >= 0) {
            placement.eviction()->resume(to, n_decoded, newest);
        }
    }
}

// What a layer has. rows: slot 0 of the region's first tensor.
bool get_layer(ByteReader& in, int layer, int to_seq, Accept accept, Placement& placement, const LayerRows& to,
               uint8_t* rows) {
    Eviction& eviction = *placement.eviction();
    Cells& cells = eviction.cells(layer);
    const uint64_t known = placement.sequences();
    const RowPlan from[2] = {get_layout(in, to.layout[0]), get_layout(in, to.layout[1])};
    bool coded_anew = false;
    for (int side = 0; side < 2; side++) {
        coded_anew = is_coded_anew(from[side].view(), to.layout[side], accept) || coded_anew;
    }
    const auto n_used = in.get<uint32_t>();
    if (static_cast<int64_t>(n_used) > cells.n_free()) {
        fail("state", "expected room for ", n_used, " tokens in layer ", layer, "; got ", cells.n_free());
    }
    for (uint32_t i = 0; i < n_used; i++) {
        auto slot = in.get<int32_t>();
        const auto pos = in.get<int32_t>();
        const auto seq = in.get<uint64_t>();
        const auto mass = in.get<float>();
        if (to_seq >= 0) {
            slot = cells.lowest_free();
        } else if ((seq & ~known) != 0) {
            fail("state", "expected sequences of the mask ", known, " in layer ", layer, "; got ", seq);
        }
        if (slot < 0 || slot >= cells.capacity() || cells.used(slot) || !is_position(pos) || seq == 0 ||
            !(mass >= 0.0F)) {
            fail("state", "expected each slot once, with a position, a sequence and a mass; got slot ", slot,
                 ", position ", pos, ", sequences ", seq, ", mass ", mass);
        }
        cells.put(slot, {pos, to_seq < 0 ? seq : bit(to_seq)});
        eviction.mass(layer)[slot] = mass;
        for (int side = 0; side < 2; side++) {
            put_row(from[side].view(), in.take(static_cast<size_t>(from[side].row_bytes())), to.layout[side],
                    rows + to.at(side, slot));
        }
    }
    return coded_anew;
}

void get_recent_masses(ByteReader& in, int to_seq, Placement& placement) {
    const auto n_recent = in.get<uint32_t>();
    for (uint32_t i = 0; i < n_recent; i++) {
        const auto pos = in.get<int32_t>();
        const auto saved_seq = in.get<uint64_t>();
        int at = -1;
        each_sequence(placement.recent() < 0 || !is_position(pos) ? 0
                      : to_seq < 0                                ? saved_seq
                                                                  : bit(to_seq),
                      [&](int s) {
                          for (const int slot : placement.cells(placement.recent()).slots_of(s, {pos, pos + 1}))
                              at = slot;
                      });
        if (at < 0) {
            fail("state", "expected masses of the recent tokens; got one of position ", pos);
        }
        for (const int il : evicting_layers(placement)) {
            const auto mass = in.get<float>();
            if (!(mass >= 0.0F)) fail("state", "expected a mass of 0 or more; got ", mass);
            placement.eviction()->recent_mass(il)[at] = mass;
        }
    }
}

}  // namespace

void put_rows(const LayerRows& layer, const uint8_t* rows, int slot, ByteWriter& out) {
    for (int side = 0; side < 2; side++) {
        const auto bytes = static_cast<size_t>(layer.layout[side].row_bytes);
        out.put(rows + layer.at(side, slot), bytes);
    }
}

void put_kept(const KvCacheOptions& options, const Placement& placement, const Rows& rows, uint64_t mask,
              ByteWriter& out) {
    if (placement.eviction() == nullptr) return;
    const Eviction& eviction = *placement.eviction();
    const uint64_t saved = mask & (bit(options.n_seq_max - 1) | (bit(options.n_seq_max - 1) - 1));
    out.put(static_cast<uint32_t>(std::popcount(saved)));
    each_sequence(saved, [&](int s) {
        out.put(static_cast<int32_t>(s));
        out.put(static_cast<int32_t>(eviction.n_decoded(s)));
    });
    const RegionRows& middle = rows.regions()[static_cast<size_t>(rows.middle())];
    HostBytes bytes = middle.host_bytes();
    const std::vector<int> layers = evicting_layers(placement);
    for (const int il : layers) {
        const LayerRows& layer = middle_rows(rows, il);
        for (const RowLayout& row : layer.layout) put_layout(out, row);
        const std::vector<int> slots = eviction.cells(il).blocks_of(mask);
        std::vector<ByteRange> ranges;
        RegionRows::add_ranges(layer, slots, most_read_between, ranges);
        bytes.read(ranges);
        out.put(static_cast<uint32_t>(slots.size()));
        for (const int slot : slots) {
            out.put(static_cast<int32_t>(slot));
            put_token(eviction.cells(il), slot, mask, out);
            out.put(eviction.mass(il)[slot]);
            put_rows(layer, bytes.data(), slot, out);
        }
    }
    const int recent = placement.recent();
    const std::vector<int> slots = recent < 0 ? std::vector<int>() : placement.cells(recent).blocks_of(mask);
    out.put(static_cast<uint32_t>(slots.size()));
    for (const int slot : slots) {
        put_token(placement.cells(recent), slot, mask, out);
        for (const int il : layers) out.put(eviction.recent_mass(il)[slot]);
    }
}

bool get_kept(ByteReader& in, int to_seq, Accept accept, Placement& placement, const Rows& rows) {
    if (placement.eviction() == nullptr) return false;
    get_sequences(in, to_seq, placement);
    const RegionRows& middle = rows.regions()[static_cast<size_t>(rows.middle())];
    HostBytes bytes = middle.host_bytes();
    bytes.read(middle.whole());
    bool coded_anew = false;
    for (const int il : evicting_layers(placement)) {
        coded_anew = get_layer(in, il, to_seq, accept, placement, middle_rows(rows, il), bytes.data()) || coded_anew;
    }
    bytes.write_back(middle.whole());
    get_recent_masses(in, to_seq, placement);
    return coded_anew;
}

}  // namespace lkv
