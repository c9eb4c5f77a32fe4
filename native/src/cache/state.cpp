// The cache's state as bytes: which slot holds what, and the rows of the slots in use, bit for bit.
//
//   u32 magic · u32 version · u32 n_sequences, 0: all of the cache, 1: one sequence · u32 n_regions, the ring with them
//   per region: u32 n_layers · u32 n_used · per layer u32 k_row_bytes, v_row_bytes, u64 hash of both layouts, 0 each where its
//                                           rows are in another region
//               per used slot: i32 slot · i32 pos · u64 seq, then its K and V rows of every layer that has some there
//
// Where tokens lie in blocks, a block in use is saved whole: its rows hold numbers of each other. Slots without a token have
// pos −1 and seq 0. The slots of all of the cache are taken again, holes included; one sequence goes to any that are free.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "cache/kv_cache.h"

namespace lkv {

class StateWriter {
public:
    template <typename T>
    void put(T value) {
        put(&value, sizeof value);
    }
    void put(const void* data, size_t n) {
        const auto* p = static_cast<const uint8_t*>(data);
        bytes_.insert(bytes_.end(), p, p + n);
    }
    std::vector<uint8_t> take() { return std::move(bytes_); }

private:
    std::vector<uint8_t> bytes_;
};

class StateReader {
public:
    explicit StateReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}
    template <typename T>
    T get() {
        T value;
        get(&value, sizeof value);
        return value;
    }
    void get(void* data, size_t n) {
        if (n > bytes_.size()) {
            fail("state", "expected ", n, " more bytes; got ", bytes_.size());
        }
        std::memcpy(data, bytes_.data(), n);
        bytes_ = bytes_.subspan(n);
    }
    bool done() const { return bytes_.empty(); }

private:
    std::span<const uint8_t> bytes_;
};

namespace {

constexpr uint32_t state_magic = 0x53564B4C;  // "LKVS"
constexpr uint32_t state_version = 2;
constexpr uint64_t all_sequences = ~uint64_t{0};

// FNV-1a over a layout: same hash, same meaning of a row's bytes.
uint64_t add_layout(uint64_t hash, const RowLayout& row) {
    const auto mix = [&hash](int32_t value) { hash = (hash ^ static_cast<uint32_t>(value)) * 1099511628211ULL; };
    mix(row.width);
    mix(row.n_groups);
    for (int g = 0; g < row.n_groups; g++) {
        const GroupLayout& group = row.groups[g];
        mix(group.column);
        mix(group.kept);
        for (int s = group.first_segment; s < group.first_segment + group.n_segments; s++) {
            mix(row.segments[s].format);
            mix(row.segments[s].width);
            mix(row.segments[s].offset);
        }
    }
    return hash;
}

uint64_t layout_hash(const RowLayout& k, const RowLayout& v) {
    return add_layout(add_layout(14695981039346656037ULL, k), v);
}

template <typename A, typename B>
void expect_same(const char* what, A expected, B got) {
    if (static_cast<uint64_t>(expected) != static_cast<uint64_t>(got)) {
        fail("state", "expected ", what, ' ', expected, " as in this session; got ", got,
             "; use the same model, --kv, --kv-budget, --sink and --recent, and of models with sliding windows the "
             "same -c");
    }
}

}  // namespace

// Slots that the sequences of `mask` hold, with all others of their blocks.
std::vector<int> KvCache::slots_of(const Region& region, uint64_t mask) {
    std::vector<int> slots;
    const int block = region.cells.block();
    for (int first = 0; first < region.cells.end(); first += block) {
        bool held = false;
        for (int slot = first; slot < first + block; slot++) held = held || (region.cells.seq(slot) & mask) != 0;
        for (int slot = first; held && slot < first + block; slot++) slots.push_back(slot);
    }
    return slots;
}

void KvCache::save(const Region& region, uint64_t mask, std::span<const int> slots, StateWriter& out) {
    std::vector<uint8_t> copy;
    const uint8_t* const rows = region.storage->load(copy);
    out.put(static_cast<uint32_t>(region.layers.size()));
    out.put(static_cast<uint32_t>(slots.size()));
    for (const Layer& layer : region.layers) {
        out.put(static_cast<uint32_t>(layer.held ? layer.k.row_bytes : 0));
        out.put(static_cast<uint32_t>(layer.held ? layer.v.row_bytes : 0));
        out.put(layer.held ? layout_hash(layer.k, layer.v) : 0);
    }
    for (const int slot : slots) {
        const uint64_t seq = region.cells.seq(slot) & mask;
        out.put(static_cast<int32_t>(slot));
        out.put(seq != 0 ? region.cells.pos(slot) : -1);
        out.put(seq);
        for (const Layer& layer : region.layers) {
            if (!layer.held) {
                continue;
            }
            const auto k_bytes = static_cast<size_t>(layer.k.row_bytes);
            const auto v_bytes = static_cast<size_t>(layer.v.row_bytes);
            out.put(rows + layer.k_offset + static_cast<size_t>(slot) * k_bytes, k_bytes);
            out.put(rows + layer.v_offset + static_cast<size_t>(slot) * v_bytes, v_bytes);
        }
    }
}

std::vector<uint8_t> KvCache::save(uint64_t mask) const {
    StateWriter out;
    out.put(state_magic);
    out.put(state_version);
    out.put(uint32_t{mask == all_sequences ? 0U : 1U});
    out.put(static_cast<uint32_t>(regions_.size() + (ring_ ? 1 : 0)));
    for (const Region& region : regions_) {
        save(region, mask, slots_of(region, mask), out);
    }
    if (ring_) {
        std::vector<int> slots = slots_of(*ring_, mask);
        if (mask !=
            all_sequences) {  // of one what its next token sees: a ring that others share may have no room for more
            const std::vector<int32_t> next = next_positions();
            std::erase_if(slots, [&](int slot) { return !is_seen_again(ring_->cells.pos(slot), mask, next); });
        }
        save(*ring_, mask, slots, out);
    }
    return out.take();
}

std::vector<uint8_t> KvCache::save() const { return save(all_sequences); }

std::vector<uint8_t> KvCache::save_sequence(int seq) const { return save(uint64_t{1} << seq); }

// to_seq: the sequence that tokens go to, in slots that are free; -1: to their own, in their own.
void KvCache::restore(Region& region, StateReader& in, int to_seq) {
    expect_same("layers", region.layers.size(), in.get<uint32_t>());
    const auto n_used = in.get<uint32_t>();
    std::vector<uint8_t> copy;
    uint8_t* const rows = region.storage->load(copy);
    for (const Layer& layer : region.layers) {
        expect_same("K row bytes", layer.held ? layer.k.row_bytes : 0, in.get<uint32_t>());
        expect_same("V row bytes", layer.held ? layer.v.row_bytes : 0, in.get<uint32_t>());
        expect_same("row layout", layer.held ? layout_hash(layer.k, layer.v) : 0, in.get<uint64_t>());
    }
    const auto block = static_cast<uint32_t>(region.cells.block());
    if (n_used % block != 0) {
        fail("state", "expected whole blocks of ", block, " slots; got ", n_used, " slots");
    }
    if (to_seq >= 0) {
        if (ring_ && &region == &*ring_) {
            make_ring_room(static_cast<int>(n_used));
        }
        if (static_cast<int>(n_used) > region.cells.n_free()) {
            fail("state", "expected room for ", n_used, " tokens in region ", region.name, "; got ",
                 region.cells.n_free());
        }
    }
    int first = 0;  // slot of the block that is being read
    for (uint32_t i = 0; i < n_used; i++) {
        // the same slots, holes included: sums over the cache keep their order, so logits are the same bits
        auto slot = in.get<int32_t>();
        const auto pos = in.get<int32_t>();
        auto seq = in.get<uint64_t>();
        if (to_seq >= 0) {
            slot = i % block == 0 ? region.cells.find_block() : first + static_cast<int>(i % block);
            seq = seq == 0 ? 0 : uint64_t{1} << to_seq;
        }
        if (slot < 0 || slot >= region.cells.capacity()) {
            fail("state", "expected slots below ", region.cells.capacity(), " in region ", region.name, "; got ", slot,
                 region.name == "ring" ? "; raise -ub / n_ubatch or n_seq_max" : "; raise -c / n_ctx");
        }
        if (i % block == 0) {
            first = slot;
        }
        if (static_cast<uint32_t>(first) % block != 0 || slot != first + static_cast<int>(i % block)) {
            fail("state", "expected whole blocks of ", block, " slots; got slot ", slot, " after block ", first);
        }
        const bool empty = block > 1 && pos == -1 && seq == 0;
        if ((!empty && (pos < 0 || seq == 0)) || region.cells.used(slot)) {
            fail("state", "expected each slot once, with a position and a sequence; got slot ", slot, ", position ",
                 pos, ", sequences ", seq);
        }
        if (!empty) {
            region.cells.place(slot, pos, seq);
        }
        for (const Layer& layer : region.layers) {
            if (!layer.held) {
                continue;
            }
            const auto k_bytes = static_cast<size_t>(layer.k.row_bytes);
            const auto v_bytes = static_cast<size_t>(layer.v.row_bytes);
            in.get(rows + layer.k_offset + static_cast<size_t>(slot) * k_bytes, k_bytes);
            in.get(rows + layer.v_offset + static_cast<size_t>(slot) * v_bytes, v_bytes);
        }
    }
    region.storage->store(copy);
}

void KvCache::check_header(StateReader& in, int to_seq) const {
    expect_same("magic", state_magic, in.get<uint32_t>());
    if (const auto version = in.get<uint32_t>(); version != state_version) {
        fail("state", "expected version ", state_version, " of a state; got ", version,
             ", which another latentkv saved");
    }
    if (const auto sequences = in.get<uint32_t>(); sequences != (to_seq < 0 ? 0 : 1)) {
        fail("state", "expected ", to_seq < 0 ? "all of a cache" : "one sequence", "; got ",
             sequences == 0 ? "all of a cache" : "one sequence");
    }
    expect_same("regions", regions_.size() + (ring_ ? 1 : 0), in.get<uint32_t>());
}

void KvCache::restore_rows(StateReader& in, int to_seq) {
    for (Region& region : regions_) {
        restore(region, in, to_seq);
    }
    if (ring_) {
        restore(*ring_, in, to_seq);
    }
    if (!in.done()) {
        fail("state", "expected the end of the state; got more bytes");
    }
    if (n_occupied() > options_.n_ctx) {
        fail("state", "expected at most ", options_.n_ctx, " cells; got ", n_occupied(), "; raise -c / n_ctx");
    }
    if (ring_ && !ring_is_complete()) {
        fail("state", "expected the rows that each sequence's window of ", ring_window_, " tokens reaches; got fewer");
    }
    cells_version_++;
}

void KvCache::restore(std::span<const uint8_t> state) {
    StateReader in(state);
    check_header(in, -1);
    clear();  // from here on a bad state leaves an empty cache, never a mixed one
    try {
        restore_rows(in, -1);
    } catch (...) {
        clear();
        throw;
    }
}

void KvCache::restore_sequence(int seq, std::span<const uint8_t> state) {
    StateReader in(state);
    check_header(in, seq);
    release_sequence(seq);
    try {
        restore_rows(in, seq);
    } catch (...) {
        release_sequence(seq);
        throw;
    }
}

}  // namespace lkv
