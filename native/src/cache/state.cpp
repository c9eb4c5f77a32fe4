// The cache's state as bytes: which slot holds what, and the rows of the slots in use, bit for bit.
//
//   u32 magic · u32 version · u64 sequences, bit s: tokens of s are in it · u32 n_regions, the ring with them
//   char[16] policy of eviction, or none · u32 tokens that a layer keeps
//   per region: char[16] name · u32 n_layers · u32 n_used · per layer the layouts of K and V: u32 n_groups, 0 where its rows are in another
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
// A sequence may be saved in parts, each a state of the tokens between two positions. The ring goes with the last part; of a
// block that two parts share each has its own tokens.
//
// Where it is asked for, rows of other layouts are coded anew (transcode.h): those of a sequence where they are finer, or all.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "cache/formats.h"
#include "cache/kv_cache.h"
#include "cache/saved_state.h"
#include "cache/transcode.h"

namespace lkv {

namespace {

// One from which a sequence can go on: sums of positions and windows stay below 2^31.
bool is_position(int32_t pos) { return pos >= 0 && pos < (int32_t{1} << 30); }

constexpr uint32_t state_magic = 0x53564B4C;  // "LKVS"
constexpr uint32_t state_version = 5;
constexpr uint64_t all_sequences = ~uint64_t{0};

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

// Whether rows of another layout are taken; false: these are the same.
bool is_coded_anew(const RowLayout& from, const RowLayout& own, Accept accept) {
    if (same_layout(from, own)) return false;
    expect_same("groups in a row", own.n_groups, from.n_groups);
    if (accept == Accept::same) {
        expect_same("row bytes", own.row_bytes, from.row_bytes);
        fail("state", "expected the row layout of this session; got another of as many bytes", as_it_was_saved);
    }
    check_finer(from, own);
    return true;
}

// Rows of layout `from` are at `saved`; rows: slot 0 of a tensor in the layout `to`.
void put_row(const RowLayout& from, const uint8_t* saved, const RowLayout& to, uint8_t* rows, int slot) {
    uint8_t* const row = rows + static_cast<size_t>(slot) * static_cast<size_t>(to.row_bytes);
    if (same_layout(from, to)) {
        std::memcpy(row, saved, static_cast<size_t>(to.row_bytes));
    } else {
        const std::vector<uint8_t> aligned(saved, saved + from.row_bytes);
        move_rows(from, aligned.data(), to, row);
    }
}

bool is_empty(const SavedToken& token) { return token.pos == -1 && token.seq == 0; }

bool is_token(const SavedToken& token, uint64_t sequences) {
    return is_position(token.pos) && token.seq != 0 && (token.seq & ~sequences) == 0;
}

// Tokens that may go anywhere. Errors: Error for one that stands for none.
void check_tokens(std::span<const SavedRegion> saved, uint64_t sequences) {
    for (const SavedRegion& region : saved) {
        for (const SavedToken& token : region.tokens) {
            if (!is_empty(token) && !is_token(token, sequences)) {
                fail("state", "expected a position and sequences of the mask ", sequences, "; got position ", token.pos,
                     ", sequences ", token.seq);
            }
        }
    }
}

}  // namespace

// Slots that the sequences of `mask` hold at these positions, with all others of their blocks.
std::vector<int> KvCache::slots_of(const Region& region, uint64_t mask, const Positions& positions) {
    std::vector<int> slots;
    const int block = region.cells.block();
    const auto is_wanted = [&](int slot) {
        return (region.cells.seq(slot) & mask) != 0 && positions.have(region.cells.pos(slot));
    };
    for (int first = 0; first < region.cells.end(); first += block) {
        bool held = false;
        for (int slot = first; slot < first + block; slot++) held = held || is_wanted(slot);
        for (int slot = first; held && slot < first + block; slot++) slots.push_back(slot);
    }
    return slots;
}

void KvCache::save(const Region& region, const uint8_t* rows, uint64_t mask, const Positions& positions,
                   std::span<const int> slots, StateWriter& out) {
    put_name(out, region.name);
    out.put(static_cast<uint32_t>(region.layers.size()));
    out.put(static_cast<uint32_t>(slots.size()));
    for (const Layer& layer : region.layers) {
        for (const RowLayout* row : {&layer.k, &layer.v}) {
            put_layout(out, region.has_row(layer) ? *row : RowLayout{});
        }
    }
    for (const int slot : slots) {
        const uint64_t seq = positions.have(region.cells.pos(slot)) ? region.cells.seq(slot) & mask : 0;
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

std::vector<std::vector<uint8_t>> KvCache::save(uint64_t mask, std::span<const Positions> parts) const {
    std::vector<StateWriter> out(parts.size());
    for (StateWriter& part : out) {
        part.put(state_magic);
        part.put(state_version);
        part.put(sequences_of(mask));
        part.put(static_cast<uint32_t>(regions_.size() + (ring_ ? 1 : 0)));
        put_name(part, policy_name());
        part.put(static_cast<uint32_t>(options_.evict.keep));
    }
    for (const Region& region : regions_) {
        std::vector<uint8_t> copy;
        const uint8_t* const rows = region.storage->load(copy);
        for (size_t i = 0; i < parts.size(); i++) {
            save(region, rows, mask, parts[i], slots_of(region, mask, parts[i]), out[i]);
        }
    }
    if (ring_) save_ring(mask, parts, out);
    if (eviction_) {
        save_kept(mask, out.back());
    }
    std::vector<std::vector<uint8_t>> saved;
    for (StateWriter& part : out) saved.push_back(part.take());
    return saved;
}

void KvCache::save_ring(uint64_t mask, std::span<const Positions> parts, std::span<StateWriter> out) const {
    std::vector<int> slots = slots_of(*ring_, mask, {});
    if (mask != all_sequences) {  // of one what its next token sees: a ring that others share may have no room for more
        const std::vector<int32_t> next = next_positions();
        std::erase_if(slots, [&](int slot) { return !is_seen_again(ring_->cells.pos(slot), mask, next); });
    }
    std::vector<uint8_t> copy;
    const uint8_t* const rows = ring_->storage->load(copy);
    for (size_t i = 0; i < parts.size(); i++) {
        const bool is_last = i + 1 == parts.size();
        save(*ring_, rows, mask, {}, is_last ? std::span<const int>(slots) : std::span<const int>(), out[i]);
    }
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
bool KvCache::restore_kept(StateReader& in, int to_seq, Accept accept) {
    bool coded_anew = false;
    Region& middle = regions_.back();
    std::vector<uint8_t> copy;
    uint8_t* const rows = middle.storage->load(copy);
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
    const uint64_t known = sequences_of(all_sequences);
    std::vector<int> layers;
    for (int il = 0; il < static_cast<int>(middle.layers.size()); il++) {
        if (evicts(il)) layers.push_back(il);
    }
    for (const int il : layers) {
        const Layer& layer = middle.layers[static_cast<size_t>(il)];
        Cells& cells = eviction_->cells(il);
        const RowPlan k = get_layout(in, layer.k);
        const RowPlan v = get_layout(in, layer.v);
        coded_anew = is_coded_anew(k.view(), layer.k, accept) || coded_anew;
        coded_anew = is_coded_anew(v.view(), layer.v, accept) || coded_anew;
        const auto n_used = in.get<uint32_t>();
        if (static_cast<int64_t>(n_used) > cells.n_free()) {
            fail("state", "expected room for ", n_used, " tokens in layer ", il, "; got ", cells.n_free());
        }
        for (uint32_t i = 0; i < n_used; i++) {
            auto slot = in.get<int32_t>();
            const auto pos = in.get<int32_t>();
            const auto seq = in.get<uint64_t>();
            const auto mass = in.get<float>();
            if (to_seq >= 0) {
                slot = cells.find_block();
            } else if ((seq & ~known) != 0) {
                fail("state", "expected sequences of the mask ", known, " in layer ", il, "; got ", seq);
            }
            if (slot < 0 || slot >= cells.capacity() || cells.used(slot) || !is_position(pos) || seq == 0 ||
                !(mass >= 0.0F)) {
                fail("state", "expected each slot once, with a position, a sequence and a mass; got slot ", slot,
                     ", position ", pos, ", sequences ", seq, ", mass ", mass);
            }
            cells.place(slot, pos, to_seq < 0 ? seq : uint64_t{1} << to_seq);
            eviction_->mass(il)[slot] = mass;
            put_row(k.view(), in.take(static_cast<size_t>(k.row_bytes())), layer.k, rows + layer.k_offset, slot);
            put_row(v.view(), in.take(static_cast<size_t>(v.row_bytes())), layer.v, rows + layer.v_offset, slot);
        }
    }
    middle.storage->store(copy);
    restore_recent_masses(in, to_seq, layers);
    return coded_anew;
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

std::vector<uint8_t> KvCache::save() const { return save(all_sequences, std::array{Positions{}}).front(); }

std::vector<uint8_t> KvCache::save_sequence(int seq) const { return save_sequence(seq, std::array{0}).front(); }

std::vector<std::vector<uint8_t>> KvCache::save_sequence(int seq, std::span<const int32_t> cuts) const {
    std::vector<Positions> parts;
    for (size_t i = 0; i < cuts.size(); i++) {
        parts.push_back({cuts[i], i + 1 < cuts.size() ? cuts[i + 1] : Positions{}.end});
        if (parts.back().first < 0 || parts.back().first >= parts.back().end) {
            fail("state", "expected cuts at rising positions of 0 or more; got ", cuts[i]);
        }
    }
    if (parts.empty() || (eviction_ && (parts.size() > 1 || parts.front().first > 0))) {
        fail("state", "expected at least one part, and under eviction one alone from position 0; got ", parts.size());
    }
    return save(uint64_t{1} << seq, parts);
}

int32_t KvCache::settled(int seq) const {
    int32_t end = seq_pos_max(seq) + 1;
    const int recent = region_index("recent");
    for (int slot = 0; recent >= 0 && slot < cells(recent).end(); slot++) {
        if ((cells(recent).seq(slot) & (uint64_t{1} << seq)) != 0) end = std::min(end, cells(recent).pos(slot));
    }
    return eviction_ ? 0 : end;
}

std::vector<const KvCache::Region*> KvCache::all_regions() const {
    std::vector<const Region*> all;
    for (const Region& region : regions_) all.push_back(&region);
    if (ring_) all.push_back(&*ring_);
    return all;
}

// to_seq: the sequence that tokens go to, in slots that are free; -1: to their own, in their own.
void KvCache::restore(Region& region, const SavedRegion& saved, uint64_t sequences, int to_seq, uint8_t* rows) {
    const size_t n_used = saved.tokens.size();
    const auto block = static_cast<size_t>(region.cells.block());
    if (n_used % block != 0) {
        fail("state", "expected whole blocks of ", block, " slots; got ", n_used, " slots");
    }
    if (to_seq >= 0) {
        if (ring_ && &region == &*ring_) {
            if (static_cast<int64_t>(n_used) <= region.cells.capacity()) make_ring_room(static_cast<int>(n_used));
        }
        if (static_cast<int64_t>(n_used) > region.cells.n_free()) {
            fail("state", "expected room for ", n_used, " tokens in region ", region.name, "; got ",
                 region.cells.n_free());
        }
    }
    int first = 0;  // slot of the block that is being read
    for (size_t i = 0; i < n_used; i++) {
        // the same slots, holes included: sums over the cache keep their order, so logits are the same bits
        auto [slot, pos, seq, bytes] = saved.tokens[i];
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
        if (static_cast<size_t>(first) % block != 0 || slot != first + static_cast<int>(i % block)) {
            fail("state", "expected whole blocks of ", block, " slots; got slot ", slot, " after block ", first);
        }
        const bool empty = block > 1 && is_empty(saved.tokens[i]);
        if ((!empty && !is_token(saved.tokens[i], sequences)) || region.cells.used(slot)) {
            fail("state", "expected each slot once, with a position and a sequence; got slot ", slot, ", position ",
                 pos, ", sequences ", seq);
        }
        if (!empty) {
            region.cells.place(slot, pos, seq);
        }
        for (size_t il = 0; il < region.layers.size(); il++) {
            const Layer& layer = region.layers[il];
            const SavedLayer& from = saved.layers[il];
            if (region.has_row(layer)) {
                put_row(from.plan[0].view(), bytes + from.offset[0], layer.k, rows + layer.k_offset, slot);
                put_row(from.plan[1].view(), bytes + from.offset[1], layer.v, rows + layer.v_offset, slot);
            }
        }
    }
}

StateHead KvCache::read_header(StateReader& in, int to_seq) const {
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
    const auto n_regions = in.get<uint32_t>();
    const std::string name = get_name(in);
    const auto keep = in.get<uint32_t>();
    if (name != policy_name() || keep != static_cast<uint32_t>(options_.evict.keep)) {
        const auto told = [](std::string_view policy, int64_t kept) {
            return policy == "none" ? std::string("none") : concat(quoted(policy), ", by which ", kept, " tokens stay");
        };
        fail("state", "expected --evict ", told(policy_name(), options_.evict.keep), " as in this session; got ",
             told(name, keep), "; use the same --evict and --keep-tokens");
    }
    return {sequences, n_regions};
}

std::vector<SavedRegion> KvCache::read_regions(StateReader& in, uint32_t n_regions) const {
    static constexpr std::array<std::string_view, 4> names = {"sink", "recent", "middle", "ring"};  // in their order
    const auto own = [this](const std::string& name, size_t il, int side) {
        const Layer& middle = regions_.back().layers[il];
        const bool full = exact_is_full_[il] && (name == names[0] || name == names[1]);
        return full ? whole_.view() : side == 0 ? middle.k : middle.v;
    };
    std::vector<SavedRegion> saved;
    auto next = names.begin();
    for (uint32_t r = 0; r < n_regions; r++) {
        saved.emplace_back(in, in_ring_.size(), own);
        next = std::find(next, names.end(), saved.back().name);
        if (next == names.end()) {
            fail("state", "expected some of sink, recent, middle and ring, in that order; got ",
                 quoted(saved.back().name));
        }
        ++next;
    }
    if (std::none_of(saved.begin(), saved.end(), [&](const SavedRegion& r) { return r.name == names[2]; })) {
        fail("state", "expected a region middle; got ", n_regions, " others");
    }
    return saved;
}

// Whether tokens can go to their own slots, in the layouts that they have.
bool KvCache::fits_in_place(std::span<const SavedRegion> saved, int to_seq) const {
    const std::vector<const Region*> own = all_regions();
    bool fits = saved.size() == own.size();
    for (size_t r = 0; fits && r < own.size(); r++) {
        fits = saved[r].name == own[r]->name;
        for (size_t il = 0; fits && il < own[r]->layers.size(); il++) {
            const Layer& layer = own[r]->layers[il];
            const SavedLayer& from = saved[r].layers[il];
            const bool has = own[r]->has_row(layer);
            fits = same_layout(from.plan[0].view(), has ? layer.k : RowLayout{}) &&
                   same_layout(from.plan[1].view(), has ? layer.v : RowLayout{});
        }
        for (const SavedToken& token : saved[r].tokens) {
            fits = fits && (to_seq >= 0 || token.slot < own[r]->cells.capacity());
        }
    }
    return fits;
}

// Errors: Error for regions or rows that are not to go to this cache's as they are.
bool KvCache::check_accepted(std::span<const SavedRegion> saved, Accept accept, const RowTurn& turned) const {
    if (turned.sides != 0) {
        fail("state",
             "expected full rows that are rotated as this session's, which they are where they are quantized; ",
             "got others; use the same --kv and --no-kv-rotate");
    }
    const std::vector<const Region*> own = all_regions();
    expect_same("regions", own.size(), saved.size());
    bool coded_anew = false;
    for (size_t r = 0; r < own.size(); r++) {
        if (saved[r].name != own[r]->name) {
            fail("state", "expected region ", own[r]->name, " as in this session; got ", saved[r].name,
                 as_it_was_saved);
        }
        for (size_t il = 0; il < own[r]->layers.size(); il++) {
            const Layer& layer = own[r]->layers[il];
            const bool has = own[r]->has_row(layer);
            for (int side = 0; side < 2; side++) {
                const RowLayout to = !has ? RowLayout{} : side == 0 ? layer.k : layer.v;
                coded_anew = is_coded_anew(saved[r].layers[il].plan[side].view(), to, accept) || coded_anew;
            }
        }
    }
    return coded_anew;
}

std::string KvCache::restore_parts(std::span<StatePart> parts, int to_seq, Accept accept, const RowTurn& turned) {
    for (StatePart& part : parts) part.regions = read_regions(part.in, part.head.n_regions);
    if (eviction_ && parts.size() != 1) {
        fail("state", "expected a sequence in one part, as tokens are evicted; got ", parts.size(), " parts");
    }
    StatePart& first = parts.front();
    std::string lost;
    if (accept == Accept::any && !eviction_ && parts.size() == 1 &&
        (turned.sides != 0 || !fits_in_place(first.regions, to_seq))) {
        check_tokens(first.regions, first.head.sequences);
        lost = Transcoder(*this, first.regions, to_seq, turned).run();
    } else {
        bool coded_anew = false;
        for (const StatePart& part : parts) {
            coded_anew = check_accepted(part.regions, accept, turned) || coded_anew;
        }
        const auto restore_region = [&](Region& region, size_t r) {
            std::vector<uint8_t> copy;
            uint8_t* const rows = region.storage->load(copy);
            for (const StatePart& part : parts) restore(region, part.regions[r], part.head.sequences, to_seq, rows);
            region.storage->store(copy);
        };
        for (size_t r = 0; r < regions_.size(); r++) restore_region(regions_[r], r);
        if (ring_) restore_region(*ring_, regions_.size());
        if (eviction_) coded_anew = restore_kept(first.in, to_seq, accept) || coded_anew;
        if (coded_anew) lost = "rows of finer formats are coded anew";
    }
    for (const StatePart& part : parts) {
        if (!part.in.done()) fail("state", "expected the end of the state; got more bytes");
    }
    if (n_occupied() > options_.n_ctx) {
        fail("state", "expected at most ", options_.n_ctx, " cells; got ", n_occupied(), "; raise -c / n_ctx");
    }
    if (ring_ && !ring_is_complete()) {
        fail("state", "expected the rows that each sequence's window of ", ring_window_, " tokens reaches; got fewer");
    }
    cells_version_++;
    return lost;
}

std::string KvCache::restore(std::span<const uint8_t> state, Accept accept, const RowTurn& turned) {
    StateReader in(state);
    const StateHead head = read_header(in, -1);
    std::array<StatePart, 1> parts{StatePart{in, head, {}}};
    clear();  // from here on a bad state leaves an empty cache, never a mixed one
    try {
        return restore_parts(parts, -1, accept, turned);
    } catch (...) {
        clear();
        throw;
    }
}

std::string KvCache::restore_sequence(int seq, std::span<const std::span<const uint8_t>> states, Accept accept,
                                      const RowTurn& turned) {
    std::vector<StatePart> parts;
    for (const std::span<const uint8_t> state : states) {
        StateReader in(state);
        const StateHead head = read_header(in, seq);
        parts.push_back({in, head, {}});
    }
    if (parts.empty()) fail("state", "expected at least one part; got none");
    release_sequence(seq);
    try {
        return restore_parts(parts, seq, accept, turned);
    } catch (...) {
        release_sequence(seq);
        throw;
    }
}

}  // namespace lkv
