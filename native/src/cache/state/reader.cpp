#include "cache/state/reader.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>
#include <utility>

#include "cache/state/kept.h"
#include "cache/state/recurrent.h"
#include "cache/state/transcode.h"

namespace lkv {
namespace {

size_t tokens_in(std::span<const StatePart> parts, std::string_view name) {
    size_t n = 0;
    for (const StatePart& part : parts) {
        for (const SavedRegion& region : part.regions) n += region.name == name ? region.tokens.size() : 0;
    }
    return n;
}

// A row's layout in a region, without groups where the layer has none there.
RowLayout own_layout(const RegionRows& region, size_t layer, int side) {
    const LayerRows& rows = region.layers[layer];
    return region.has_row(rows) ? rows.layout[side] : RowLayout{};
}

// Tokens that may go anywhere. Errors: Error for one that stands for none.
void check_tokens(std::span<const SavedRegion> saved, uint64_t sequences) {
    for (const SavedRegion& region : saved) {
        for (const SavedToken& token : region.tokens) {
            if (!token.is_empty() && !token.is_of(sequences)) {
                fail("state", "expected a position and sequences of the mask ", sequences, "; got position ", token.pos,
                     ", sequences ", token.seq);
            }
        }
    }
}

}  // namespace

std::string StateReader::all(std::span<const uint8_t> state) {
    std::array<StatePart, 1> parts{open(state, -1)};
    cache_.clear();  // from here on a bad state leaves an empty cache, never a mixed one
    try {
        return put(parts, -1);
    } catch (...) {
        cache_.clear();
        throw;
    }
}

std::string StateReader::sequence(int seq, std::span<const std::span<const uint8_t>> states) {
    std::vector<StatePart> parts;
    for (const std::span<const uint8_t> state : states) parts.push_back(open(state, seq));
    if (parts.empty()) fail("state", "expected at least one part; got none");
    cache_.remove_whole(seq);
    try {
        return put(parts, seq);
    } catch (...) {
        cache_.remove_whole(seq);
        throw;
    }
}

StatePart StateReader::open(std::span<const uint8_t> state, int to_seq) const {
    ByteReader in(state);
    expect_same("magic", state_magic, in.get<uint32_t>());
    if (const auto version = in.get<uint32_t>(); version != state_version) {
        fail("state", "expected version ", state_version, " of a state; got ", version,
             ", which another latentkv saved");
    }
    const auto sequences = in.get<uint64_t>();
    if (const int n = std::popcount(sequences); to_seq >= 0 && n > 1) {
        fail("state", "expected one sequence; got ", n);
    }
    const int n_seq_max = cache_.options().n_seq_max;
    if (const int end = std::bit_width(sequences); to_seq < 0 && end > n_seq_max) {
        fail("state", "expected sequences below ", n_seq_max, "; got ", end - 1, "; raise n_seq_max");
    }
    const auto n_regions = in.get<uint32_t>();
    const std::string name = get_name(in);
    const auto keep = in.get<uint32_t>();
    const int own_keep = cache_.options().evict.keep;
    if (name != placement_.policy_name() || keep != static_cast<uint32_t>(own_keep)) {
        const auto told = [](std::string_view policy, int64_t kept) {
            return policy == "none" ? std::string("none") : concat(quoted(policy), ", by which ", kept, " tokens stay");
        };
        fail("state", "expected --evict ", told(placement_.policy_name(), own_keep), " as in this session; got ",
             told(name, keep), "; use the same --evict and --keep-tokens");
    }
    return {in, {sequences, n_regions}, {}};
}

std::vector<SavedRegion> StateReader::get_regions(ByteReader& in, uint32_t n_regions) const {
    static constexpr std::array<std::string_view, 4> names = {"sink", "recent", "middle", "ring"};  // in their order
    const auto own = [this](const std::string& name, size_t il, int side) {
        const auto layer = static_cast<int>(il);
        const bool is_exact = name == names[0] || name == names[1];
        return rows_.groups_of(layer, side == 1, is_exact && rows_.exact_is_full(layer));
    };
    std::vector<SavedRegion> saved;
    auto next = names.begin();
    for (uint32_t r = 0; r < n_regions; r++) {
        saved.emplace_back(in, static_cast<size_t>(rows_.n_layers()), own);
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

std::string StateReader::put(std::span<StatePart> parts, int to_seq) {
    for (StatePart& part : parts) part.regions = get_regions(part.in, part.head.n_regions);
    const bool evicts = placement_.eviction() != nullptr;
    if (evicts && parts.size() != 1) {
        fail("state", "expected a sequence in one part, as tokens are evicted; got ", parts.size(), " parts");
    }
    StatePart& first = parts.front();
    if (to_seq >= 0) make_room(parts);
    std::string lost;
    if (accept_ == Accept::any && !evicts && parts.size() == 1 &&
        (rotation_.sides != 0 || !fits_in_place(first.regions, to_seq))) {
        check_tokens(first.regions, first.head.sequences);
        lost = Transcoder(cache_, first.regions, to_seq, rotation_).run();
    } else {
        bool coded_anew = false;
        for (const StatePart& part : parts) coded_anew = check_accepted(part.regions) || coded_anew;
        if (to_seq < 0 && !fits_memory(first.regions)) {
            fail("state", "expected exact and compressed tokens that fit into the memory which they share; got more",
                 as_it_was_saved);
        }
        for (size_t r = 0; r < rows_.regions().size(); r++) put_region(r, parts, to_seq);
        coded_anew = get_kept(first.in, to_seq, accept_, placement_, rows_) || coded_anew;
        if (coded_anew) lost = "rows of finer formats are coded anew";
    }
    for (StatePart& part : parts) get_recurrent(part.in, part.head.sequences, to_seq, cache_);
    check_whole(parts);
    placement_.changed();
    return lost;
}

// In the middle, where it takes token blocks or shares memory with exact tokens.
void StateReader::make_room(std::span<const StatePart> parts) {
    const auto n = static_cast<int64_t>(tokens_in(parts, "middle"));
    const auto n_exact = static_cast<int64_t>(tokens_in(parts, "recent"));
    if (n > placement_.cells(placement_.middle()).capacity() || n + n_exact > cache_.options().n_ctx) return;
    if (placement_.has_tiers()) cache_.make_exact_room(static_cast<int>(n_exact), static_cast<int>(n));
    if (placement_.takes_blocks()) cache_.free_blocks(static_cast<int>(n) / token_block_slots);
}

void StateReader::check_whole(std::span<const StatePart> parts) const {
    check_recurrent(cache_);
    for (const StatePart& part : parts) {
        if (!part.in.done()) fail("state", "expected the end of the state; got more bytes");
    }
    const int n_ctx = cache_.options().n_ctx;
    if (placement_.n_used() > n_ctx) {
        fail("state", "expected at most ", n_ctx, " cells; got ", placement_.n_used(), "; raise -c / n_ctx");
    }
    if (!placement_.is_complete(all_sequences)) {
        fail("state", "expected the rows that each sequence's window of ", placement_.ring()->window(),
             " tokens reaches; got fewer");
    }
}

// to_seq: the sequence that tokens go to, in slots that are free; -1: to their own, in their own.
void StateReader::put_region(size_t index, std::span<const StatePart> parts, int to_seq) {
    const RegionRows& region = rows_.regions()[index];
    HostBytes rows = region.host_bytes();
    std::vector<int> slots;
    const auto put = [&](const StatePart& part, std::span<const SavedToken> tokens) {
        placement_.limit_cells();
        put_region(index, part.regions[index], tokens, part.head.sequences, to_seq, rows.data(), slots);
    };
    const auto write = [&] { rows.write_back(region.ranges_of(std::exchange(slots, {}), 0)); };
    const bool leaves = placement_.has_tiers() && static_cast<int>(index) == placement_.recent() && to_seq >= 0;
    for (const StatePart& part : parts) {
        if (!leaves) {
            put(part, part.regions[index].tokens);
            continue;
        }
        // those that find no room later push the oldest out, before what is in the middle comes there
        const auto n_settling = static_cast<int>(tokens_in(parts, "middle"));
        std::vector<SavedToken> tokens = part.regions[index].tokens;
        std::stable_sort(tokens.begin(), tokens.end(),
                         [](const SavedToken& a, const SavedToken& b) { return a.pos < b.pos; });
        for (size_t first = 0, n = 0; first < tokens.size(); first += n) {
            n = std::min(tokens.size() - first, static_cast<size_t>(placement_.most_exact(n_settling)));
            cache_.make_exact_room(static_cast<int>(n), n_settling);
            put(part, std::span(tokens).subspan(first, n));
            write();
        }
    }
    write();
}

void StateReader::put_region(size_t index, const SavedRegion& saved, std::span<const SavedToken> tokens,
                             uint64_t sequences, int to_seq, uint8_t* rows, std::vector<int>& slots) {
    const RegionRows& region = rows_.regions()[index];
    Cells& cells = placement_.cells_of_rows(static_cast<int>(index));
    const size_t n_used = tokens.size();
    const auto block = static_cast<size_t>(cells.block());
    if (n_used % block != 0) {
        fail("state", "expected whole blocks of ", block, " slots; got ", n_used, " slots");
    }
    if (to_seq >= 0) {
        const bool may_fit = static_cast<int64_t>(n_used) <= cells.capacity();
        if (region.name == "ring" && may_fit) placement_.ring()->make_room(placement_, static_cast<int>(n_used));
        if (static_cast<int64_t>(n_used) > cells.n_free()) {
            fail("state", "expected room for ", n_used, " tokens in region ", region.name, "; got ", cells.n_free());
        }
    }
    int first = 0;  // slot of the block that is being read
    for (size_t i = 0; i < n_used; i++) {
        // the same slots, holes included: sums over the cache keep their order, so logits are the same bits
        auto [slot, pos, seq, bytes] = tokens[i];
        if (to_seq >= 0) {
            slot = i % block == 0 ? cells.find_free(bit(to_seq)) : first + static_cast<int>(i % block);
            seq = seq == 0 ? 0 : bit(to_seq);
        }
        if (slot < 0 || slot >= cells.capacity()) {
            fail("state", "expected slots below ", cells.capacity(), " in region ", region.name, "; got ", slot,
                 region.name == "ring" ? "; raise -ub / n_ubatch or n_seq_max" : "; raise -c / n_ctx");
        }
        if (i % block == 0) {
            first = slot;
        }
        if (static_cast<size_t>(first) % block != 0 || slot != first + static_cast<int>(i % block)) {
            fail("state", "expected whole blocks of ", block, " slots; got slot ", slot, " after block ", first);
        }
        const bool empty = block > 1 && tokens[i].is_empty();
        if ((!empty && !tokens[i].is_of(sequences)) || cells.used(slot)) {
            fail("state", "expected each slot once, with a position and a sequence; got slot ", slot, ", position ",
                 pos, ", sequences ", seq);
        }
        if (!empty) {
            cells.put(slot, {pos, seq});
        }
        slots.push_back(slot);
        for (size_t il = 0; il < region.layers.size(); il++) {
            const LayerRows& layer = region.layers[il];
            const SavedLayer& from = saved.layers[il];
            for (int side = 0; region.has_row(layer) && side < 2; side++) {
                put_row(from.plan[side].view(), bytes + from.offset[side], layer.layout[side],
                        rows + layer.at(side, slot));
            }
        }
    }
}

// Whether tokens can go to their own slots, or to free ones of a sequence, in the layouts that they have.
bool StateReader::fits_in_place(std::span<const SavedRegion> saved, int to_seq) const {
    const std::span<const RegionRows> own = rows_.regions();
    bool fits = saved.size() == own.size();
    for (size_t r = 0; fits && r < own.size(); r++) {
        fits = saved[r].name == own[r].name;
        for (size_t il = 0; fits && il < own[r].layers.size(); il++) {
            for (int side = 0; side < 2; side++) {
                fits = fits && same_layout(saved[r].layers[il].plan[side].view(), own_layout(own[r], il, side));
            }
        }
        const Cells& cells = placement_.cells_of_rows(static_cast<int>(r));
        if (to_seq >= 0) {
            const bool leaves = placement_.has_tiers() && static_cast<int>(r) == placement_.recent();
            fits =
                fits && (leaves || own[r].name == "ring" || static_cast<int>(saved[r].tokens.size()) <= cells.n_free());
            continue;
        }
        for (const SavedToken& token : saved[r].tokens) fits = fits && token.slot < cells.capacity();
    }
    return fits && (to_seq >= 0 || fits_memory(saved));
}

// Whether exact and compressed tokens fit beside each other in their own slots. saved: the regions of this cache
bool StateReader::fits_memory(std::span<const SavedRegion> saved) const {
    if (!placement_.has_tiers()) return true;
    const auto end_of = [&](int region) {
        int end = 0;
        for (const SavedToken& token : saved[static_cast<size_t>(region)].tokens) end = std::max(end, token.slot + 1);
        return end;
    };
    return placement_.fit(end_of(placement_.recent()), end_of(placement_.middle()));
}

// Whether rows are coded anew. Errors: Error for regions or rows that are not to go to this cache's as they are.
bool StateReader::check_accepted(std::span<const SavedRegion> saved) const {
    if (rotation_.sides != 0) {
        fail("state",
             "expected full rows that are rotated as this session's, which they are where they are quantized; ",
             "got others; use the same --kv and --no-kv-rotate");
    }
    const std::span<const RegionRows> own = rows_.regions();
    expect_same("regions", own.size(), saved.size());
    bool coded_anew = false;
    for (size_t r = 0; r < own.size(); r++) {
        if (saved[r].name != own[r].name) {
            fail("state", "expected region ", own[r].name, " as in this session; got ", saved[r].name, as_it_was_saved);
        }
        for (size_t il = 0; il < own[r].layers.size(); il++) {
            for (int side = 0; side < 2; side++) {
                const RowLayout from = saved[r].layers[il].plan[side].view();
                coded_anew = is_coded_anew(from, own_layout(own[r], il, side), accept_) || coded_anew;
            }
        }
    }
    return coded_anew;
}

}  // namespace lkv
