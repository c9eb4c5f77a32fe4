// The cache's state as bytes: which slot holds what, and the rows of the slots in use, bit for bit.
//
//   u32 magic · u32 version · u64 sequences, bit s: tokens of s are in it · u32 n_regions, the ring with them
//   char[16] policy of eviction, or none · u32 tokens that a layer keeps
//   per region: u32 n_layers · u32 n_used · per layer the layouts of K and V: u32 n_groups, 0 where its rows are in another
//                                           region · per group u32 n_segments · per segment i32 format, i32 width
//               per used slot: i32 slot · i32 pos · u64 seq, then its K and V rows of every layer that has some there
//   under eviction: u32 n · per sequence i32 sequence, i32 tokens that came one by one
//                   per layer that evicts: layouts of K and V · u32 n_used · per used slot i32 slot · i32 pos · u64 seq · f32 mass, its rows
//                   u32 n · per token of recent i32 pos · u64 seq, f32 mass in each of these layers
//
// Where tokens lie in blocks, a block in use is saved whole: its rows hold numbers of each other. Slots without a token have
// pos −1 and seq 0. A row that sequences share is there once, and is shared again.
//
// A state replaces the cache, and takes its slots again, holes included; or, where it is of one sequence, that sequence or
// another, in any slots that are free: whoever saved it, all of a cache or the sequence alone.
//
// A sequence may come from rows of finer formats, where it is asked for: it is coded anew, segment by segment, as in a
// demotion. Segments that this cache does not keep are dropped: axes are sorted, and the file's segments are the same.
#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "base/error.h"
#include "cache/formats.h"
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
constexpr uint32_t state_version = 4;
constexpr size_t name_bytes = 16;
constexpr uint64_t all_sequences = ~uint64_t{0};

// Stored segments, and behind them what a group drops as one of `none`.
void put_layout(StateWriter& out, const RowLayout& row) {
    out.put(static_cast<uint32_t>(row.n_groups));
    for (int g = 0; g < row.n_groups; g++) {
        const GroupLayout& group = row.groups[g];
        const int dropped = group.width - group.kept;
        out.put(static_cast<uint32_t>(group.n_segments + (dropped > 0 ? 1 : 0)));
        for (int s = group.first_segment; s < group.first_segment + group.n_segments; s++) {
            out.put(row.segments[s].format);
            out.put(row.segments[s].width);
        }
        if (dropped > 0) {
            out.put(static_cast<int32_t>(Format::none));
            out.put(static_cast<int32_t>(dropped));
        }
    }
}

constexpr const char* as_it_was_saved =
    "; use the same model, --kv, --kv-budget, --sink and --recent, and of models with sliding windows the same -c";

template <typename A, typename B>
void expect_same(const char* what, A expected, B got) {
    if (static_cast<uint64_t>(expected) != static_cast<uint64_t>(got)) {
        fail("state", "expected ", what, ' ', expected, " as in this session; got ", got, as_it_was_saved);
    }
}

// A layout with the groups of `own`.
RowPlan get_layout(StateReader& in, const RowLayout& own) {
    expect_same("groups in a row", own.n_groups, in.get<uint32_t>());
    std::vector<std::vector<SegmentSpec>> groups;
    for (int g = 0; g < own.n_groups; g++) {
        const auto n_segments = in.get<uint32_t>();
        if (n_segments == 0 || n_segments > static_cast<uint32_t>(own.groups[g].width)) {
            fail("state", "expected 1 to ", own.groups[g].width, " segments in a group; got ", n_segments);
        }
        std::vector<SegmentSpec>& segments = groups.emplace_back();
        int64_t width = 0;
        for (uint32_t s = 0; s < n_segments; s++) {
            const auto format = in.get<int32_t>();
            segments.push_back({static_cast<Format>(format), in.get<int32_t>()});
            width += segments.back().width;
        }
        expect_same("channels in a group", own.groups[g].width, width);
    }
    try {
        return RowPlan(groups);
    } catch (const std::invalid_argument& error) {
        fail("state", "expected a row's layout; got one that says: ", error.what());
    }
}

bool same_layout(const RowLayout& a, const RowLayout& b) {
    const auto same_segment = [](const SegmentLayout& s, const SegmentLayout& t) {
        return s.format == t.format && s.width == t.width && s.offset == t.offset;
    };
    bool same = a.row_bytes == b.row_bytes;
    for (int g = 0; same && g < a.n_groups; g++) {
        const GroupLayout& ga = a.groups[g];
        const GroupLayout& gb = b.groups[g];
        same = ga.n_segments == gb.n_segments &&
               std::equal(a.segments + ga.first_segment, a.segments + ga.first_segment + ga.n_segments,
                          b.segments + gb.first_segment, same_segment);
    }
    return same;
}

// A sequence's rows in another layout: never coarser than those that this cache would have written.
void check_finer(const RowLayout& from, const RowLayout& to) {
    bool finer = !in_blocks(from) && !in_blocks(to);
    for (int g = 0; finer && g < to.n_groups; g++) {
        const GroupLayout& gf = from.groups[g];
        const GroupLayout& gt = to.groups[g];
        finer = gf.n_segments >= gt.n_segments;
        for (int s = 0; finer && s < gt.n_segments; s++) {
            const SegmentLayout& f = from.segments[gf.first_segment + s];
            const SegmentLayout& t = to.segments[gt.first_segment + s];
            finer = f.width == t.width && format_bytes(static_cast<Format>(f.format), f.width) >=
                                              format_bytes(static_cast<Format>(t.format), t.width);
        }
    }
    if (!finer) {
        fail("state",
             "expected rows of single tokens that are as fine as this session's or finer, segment by segment; got ",
             from.row_bytes, " bytes where this session has ", to.row_bytes, as_it_was_saved);
    }
}

// What a tensor's rows are like in a state.
struct SavedRows {
    RowPlan plan;
    bool differs;  // from those of this cache
};

SavedRows saved_rows(StateReader& in, const RowLayout& own, bool convert) {
    SavedRows saved{get_layout(in, own), false};
    saved.differs = !same_layout(saved.plan.view(), own);
    if (saved.differs && !convert) {
        expect_same("row bytes", own.row_bytes, saved.plan.row_bytes());
        fail("state", "expected the row layout of this session; got another of as many bytes", as_it_was_saved);
    }
    if (saved.differs) {
        check_finer(saved.plan.view(), own);
    }
    return saved;
}

// rows: slot 0 of a tensor in the layout `to`.
void get_row(StateReader& in, const SavedRows& from, const RowLayout& to, uint8_t* rows, int slot) {
    uint8_t* const row = rows + static_cast<size_t>(slot) * static_cast<size_t>(to.row_bytes);
    if (!from.differs) {
        in.get(row, static_cast<size_t>(to.row_bytes));
        return;
    }
    std::vector<uint8_t> other(static_cast<size_t>(from.plan.row_bytes()));
    in.get(other.data(), other.size());
    move_rows(from.plan.view(), other.data(), to, row);
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
        for (const RowLayout* row : {&layer.k, &layer.v}) {
            put_layout(out, region.has_row(layer) ? *row : RowLayout{});
        }
    }
    for (const int slot : slots) {
        const uint64_t seq = region.cells.seq(slot) & mask;
        out.put(static_cast<int32_t>(slot));
        out.put(seq != 0 ? region.cells.pos(slot) : -1);
        out.put(seq);
        for (const Layer& layer : region.layers) {
            if (!region.has_row(layer)) {
                continue;
            }
            const auto k_bytes = static_cast<size_t>(layer.k.row_bytes);
            const auto v_bytes = static_cast<size_t>(layer.v.row_bytes);
            out.put(rows + layer.k_offset + static_cast<size_t>(slot) * k_bytes, k_bytes);
            out.put(rows + layer.v_offset + static_cast<size_t>(slot) * v_bytes, v_bytes);
        }
    }
}

uint64_t KvCache::sequences_of(uint64_t mask) const {
    uint64_t found = 0;
    for (const Region& region : regions_) {
        for (int slot = 0; slot < region.cells.end(); slot++) found |= region.cells.seq(slot);
    }
    return found & mask;
}

std::vector<uint8_t> KvCache::save(uint64_t mask) const {
    StateWriter out;
    out.put(state_magic);
    out.put(state_version);
    out.put(sequences_of(mask));
    out.put(static_cast<uint32_t>(regions_.size() + (ring_ ? 1 : 0)));
    char name[name_bytes] = {};
    std::strncpy(name, policy_name(), name_bytes - 1);
    out.put(name, name_bytes);
    out.put(static_cast<uint32_t>(options_.evict.keep));
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
    if (eviction_) {
        save_kept(mask, out);
    }
    return out.take();
}

const char* KvCache::policy_name() const { return eviction_ ? eviction_->policy().name : "none"; }

void KvCache::save_kept(uint64_t mask, StateWriter& out) const {
    const Region& middle = regions_.back();
    std::vector<uint8_t> copy;
    const uint8_t* const rows = middle.storage->load(copy);
    const auto held = [mask](const Cells& cells) {
        std::vector<int> slots;
        for (int slot = 0; slot < cells.end(); slot++) {
            if ((cells.seq(slot) & mask) != 0) slots.push_back(slot);
        }
        return slots;
    };
    out.put(static_cast<uint32_t>(options_.n_seq_max));
    for (int s = 0; s < options_.n_seq_max; s++) {
        out.put(static_cast<int32_t>(s));
        out.put(static_cast<int32_t>(eviction_->n_decoded(s)));
    }
    std::vector<int> layers;
    for (int il = 0; il < static_cast<int>(middle.layers.size()); il++) {
        if (evicts(il)) layers.push_back(il);
    }
    for (const int il : layers) {
        const Layer& layer = middle.layers[static_cast<size_t>(il)];
        const Cells& cells = eviction_->cells(il);
        put_layout(out, layer.k);
        put_layout(out, layer.v);
        const std::vector<int> slots = held(cells);
        out.put(static_cast<uint32_t>(slots.size()));
        for (const int slot : slots) {
            out.put(static_cast<int32_t>(slot));
            out.put(cells.pos(slot));
            out.put(cells.seq(slot) & mask);
            out.put(eviction_->mass(il)[slot]);
            const auto k_bytes = static_cast<size_t>(layer.k.row_bytes);
            const auto v_bytes = static_cast<size_t>(layer.v.row_bytes);
            out.put(rows + layer.k_offset + static_cast<size_t>(slot) * k_bytes, k_bytes);
            out.put(rows + layer.v_offset + static_cast<size_t>(slot) * v_bytes, v_bytes);
        }
    }
    const int recent = region_index("recent");
    const std::vector<int> slots = recent < 0 ? std::vector<int>() : held(cells(recent));
    out.put(static_cast<uint32_t>(slots.size()));
    for (const int slot : slots) {
        out.put(cells(recent).pos(slot));
        out.put(cells(recent).seq(slot) & mask);
        for (const int il : layers) out.put(eviction_->recent_mass(il)[slot]);
    }
}

// to_seq: as of restore().
bool KvCache::restore_kept(StateReader& in, int to_seq, bool convert) {
    Region& middle = regions_.back();
    std::vector<uint8_t> copy;
    uint8_t* const rows = middle.storage->load(copy);
    bool converts = false;
    const auto n_sequences = in.get<uint32_t>();
    for (uint32_t i = 0; i < n_sequences; i++) {
        const auto seq = in.get<int32_t>();
        const auto n_decoded = in.get<int32_t>();
        if (seq < 0 || seq >= max_sequences || n_decoded < 0) {
            fail("state", "expected a sequence and how many of its tokens were decoded; got ", seq, " and ", n_decoded);
        }
        const int to = to_seq < 0 ? seq : to_seq;
        if (const int32_t newest = to < options_.n_seq_max ? seq_pos_max(to) : -1; newest >= 0) {
            eviction_->resume(to, n_decoded, newest);
        }
    }
    std::vector<int> layers;
    for (int il = 0; il < static_cast<int>(middle.layers.size()); il++) {
        if (evicts(il)) layers.push_back(il);
    }
    for (const int il : layers) {
        const Layer& layer = middle.layers[static_cast<size_t>(il)];
        Cells& cells = eviction_->cells(il);
        const SavedRows k = saved_rows(in, layer.k, convert);
        const SavedRows v = saved_rows(in, layer.v, convert);
        converts = converts || k.differs || v.differs;
        const auto n_used = in.get<uint32_t>();
        if (static_cast<int64_t>(n_used) > cells.n_free()) {
            fail("state", "expected room for ", n_used, " tokens in layer ", il, "; got ", cells.n_free());
        }
        for (uint32_t i = 0; i < n_used; i++) {
            auto slot = in.get<int32_t>();
            const auto pos = in.get<int32_t>();
            const auto seq = in.get<uint64_t>();
            const auto mass = in.get<float>();
            if (to_seq >= 0) slot = cells.find_block();
            if (slot < 0 || slot >= cells.capacity() || cells.used(slot) || pos < 0 || seq == 0 || !(mass >= 0.0F)) {
                fail("state", "expected each slot once, with a position, a sequence and a mass; got slot ", slot,
                     ", position ", pos, ", sequences ", seq, ", mass ", mass);
            }
            cells.place(slot, pos, to_seq < 0 ? seq : uint64_t{1} << to_seq);
            eviction_->mass(il)[slot] = mass;
            get_row(in, k, layer.k, rows + layer.k_offset, slot);
            get_row(in, v, layer.v, rows + layer.v_offset, slot);
        }
    }
    middle.storage->store(copy);
    restore_recent_masses(in, to_seq, layers);
    return converts;
}

void KvCache::restore_recent_masses(StateReader& in, int to_seq, std::span<const int> layers) {
    const int recent = region_index("recent");
    const auto n_recent = in.get<uint32_t>();
    for (uint32_t i = 0; i < n_recent; i++) {
        const auto pos = in.get<int32_t>();
        const auto saved_seq = in.get<uint64_t>();
        const uint64_t seq = to_seq < 0 ? saved_seq : uint64_t{1} << to_seq;
        int at = -1;
        for (int slot = 0; recent >= 0 && slot < cells(recent).end(); slot++) {
            if (cells(recent).pos(slot) == pos && (cells(recent).seq(slot) & seq) != 0) at = slot;
        }
        if (at < 0) {
            fail("state", "expected masses of the recent tokens; got one of position ", pos);
        }
        for (const int il : layers) {
            const auto mass = in.get<float>();
            if (!(mass >= 0.0F)) fail("state", "expected a mass of 0 or more; got ", mass);
            eviction_->recent_mass(il)[at] = mass;
        }
    }
}

std::vector<uint8_t> KvCache::save() const { return save(all_sequences); }

std::vector<uint8_t> KvCache::save_sequence(int seq) const { return save(uint64_t{1} << seq); }

// to_seq: the sequence that tokens go to, in slots that are free; -1: to their own, in their own. Whether rows were coded anew.
bool KvCache::restore(Region& region, StateReader& in, uint64_t sequences, int to_seq, bool convert) {
    expect_same("layers", region.layers.size(), in.get<uint32_t>());
    const auto n_used = in.get<uint32_t>();
    std::vector<uint8_t> copy;
    uint8_t* const rows = region.storage->load(copy);
    std::vector<SavedRows> saved;  // of K and V of every layer
    bool converts = false;
    for (const Layer& layer : region.layers) {
        for (const RowLayout* row : {&layer.k, &layer.v}) {
            saved.push_back(saved_rows(in, region.has_row(layer) ? *row : RowLayout{}, convert));
            converts = converts || saved.back().differs;
        }
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
        if ((seq & ~sequences) != 0) {
            fail("state", "expected sequences of the mask ", sequences, "; got ", seq);
        }
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
        for (size_t il = 0; il < region.layers.size(); il++) {
            const Layer& layer = region.layers[il];
            if (region.has_row(layer)) {
                get_row(in, saved[2 * il], layer.k, rows + layer.k_offset, slot);
                get_row(in, saved[2 * il + 1], layer.v, rows + layer.v_offset, slot);
            }
        }
    }
    region.storage->store(copy);
    return converts;
}

// Which sequences are in it.
uint64_t KvCache::read_header(StateReader& in, int to_seq) const {
    expect_same("magic", state_magic, in.get<uint32_t>());
    if (const auto version = in.get<uint32_t>(); version != state_version) {
        fail("state", "expected version ", state_version, " of a state; got ", version,
             ", which another latentkv saved");
    }
    const auto sequences = in.get<uint64_t>();
    if (const int n = std::popcount(sequences); to_seq >= 0 && n > 1) {
        fail("state", "expected one sequence; got ", n);
    }
    if (const int end = std::bit_width(sequences); to_seq < 0 && end > options_.n_seq_max) {
        fail("state", "expected sequences below ", options_.n_seq_max, "; got ", end - 1, "; raise n_seq_max");
    }
    expect_same("regions", regions_.size() + (ring_ ? 1 : 0), in.get<uint32_t>());
    char name[name_bytes + 1] = {};
    in.get(name, name_bytes);
    const auto keep = in.get<uint32_t>();
    if (name != std::string_view(policy_name()) || keep != static_cast<uint32_t>(options_.evict.keep)) {
        const auto told = [](std::string_view policy, int64_t kept) {
            return policy == "none" ? std::string("none") : concat(quoted(policy), ", by which ", kept, " tokens stay");
        };
        fail("state", "expected --evict ", told(policy_name(), options_.evict.keep), " as in this session; got ",
             told(name, keep), "; use the same --evict and --keep-tokens");
    }
    return sequences;
}

bool KvCache::restore_rows(StateReader& in, uint64_t sequences, int to_seq, bool convert) {
    bool converts = false;
    for (Region& region : regions_) {
        converts = restore(region, in, sequences, to_seq, convert) || converts;
    }
    if (ring_) {
        converts = restore(*ring_, in, sequences, to_seq, convert) || converts;
    }
    if (eviction_) {
        converts = restore_kept(in, to_seq, convert) || converts;
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
    return converts;
}

void KvCache::restore(std::span<const uint8_t> state) {
    StateReader in(state);
    const uint64_t sequences = read_header(in, -1);
    clear();  // from here on a bad state leaves an empty cache, never a mixed one
    try {
        restore_rows(in, sequences, -1, false);
    } catch (...) {
        clear();
        throw;
    }
}

bool KvCache::restore_sequence(int seq, std::span<const uint8_t> state, bool convert) {
    StateReader in(state);
    const uint64_t sequences = read_header(in, seq);
    release_sequence(seq);
    try {
        return restore_rows(in, sequences, seq, convert);
    } catch (...) {
        release_sequence(seq);
        throw;
    }
}

}  // namespace lkv
