#include "cache/kv_cache.h"

#include <algorithm>

#include "base/error.h"
#include "cache/slots.h"

namespace lkv {
namespace {

void check_eviction(const KvCacheOptions& options) {
    if (options.runs.size() > 1) {
        fail("evict", "expected all layers on one device; got ", runs_text(options.runs),
             "; use -ngl 0, or 99 with --split-mode none");
    }
    if (options.recent_ratio > 0) {
        fail("evict", "expected a number of recent tokens, --recent N; got a share of the sequence, ",
             options.recent_ratio);
    }
    const int least = options.sink + options.recent + slot_tile;
    if (options.evict.keep < least) {
        fail("keep_tokens", "expected at least ", least, " tokens: ", options.sink, " sinks, ", options.recent,
             " recent ones and ", slot_tile, " compressed ones; raise --keep-tokens, or lower --sink or --recent; got ",
             options.evict.keep);
    }
}

// Bytes of one sequence's states, in the recurrent ones of these layers.
size_t state_bytes(const HParams& hparams, int first_layer, int end_layer) {
    size_t bytes = 0;
    for (int il = first_layer; il < end_layer; il++) {
        if (hparams.recurs(il)) bytes += static_cast<size_t>(hparams.state_floats()) * sizeof(float);
    }
    return bytes;
}

}  // namespace

KvCache::KvCache(const HParams& hparams, const CacheSpec& spec, const KvCacheOptions& options, bool allocate,
                 const std::vector<CacheDevice*>& devices)
    : options_(options),
      rows_(hparams, spec, options, devices),
      placement_(make_placement(hparams)),
      states_(options.n_seq_max, state_bytes(hparams, 0, hparams.n_layer), options.n_guesses) {
    for (const LayerRun& run : options_.runs) {
        state_bytes_.push_back(state_bytes(hparams, run.first_layer, run.end_layer));
    }
    for (int il = 0; il < hparams.n_layer; il++) {
        const int held = placement_.in_ring(il) ? placement_.n_regions() : placement_.middle();
        if (!hparams.makes_rows(il)) continue;
        const double sides = hparams.has_mla() ? 1.0 : 2.0;
        f16_bytes_ += sides * 2.0 * hparams.heads_of(il).width() * placement_.cells_of_rows(held).capacity();
    }
    if (!allocate) return;
    // Rows first: their pages stay untouched, and a system that refuses them does so before any cell is written.
    rows_.allocate();
    placement_.allocate();
}

Placement KvCache::make_placement(const HParams& hparams) {
    const bool blocks = rows_.takes_token_blocks();
    const bool evicts = options_.evict.policy != nullptr;
    if (evicts) check_eviction(options_);
    if (blocks && !options_.keeps_recent()) {
        fail("recent",
             "expected recent tokens, --recent 1 or more, beside rows of K in blocks of 32 tokens (c8 … c2), ",
             "as a block waits there until it is full; got none");
    }
    if (blocks && evicts) {
        fail("evict", "expected a format of single tokens for K, as tokens go one by one; choose --kv q8 … q2; got ",
             "blocks of 32 (c8 … c2)");
    }
    std::vector<int> windows(static_cast<size_t>(hparams.n_layer), 0);
    const auto& layers = hparams.block.layers;
    for (size_t il = 0; il < layers.size(); il++) windows[il] = layers[il].window;
    CacheSlots slots = count_slots(options_, windows, blocks && !options_.k_format);
    rows_.set_ring(slots.in_ring);
    const bool shares = window_grows(options_, rows_.spec(), hparams);
    if (shares) slots.recent = std::max(slots.recent, slots.least_exact);
    if (slots.sink > 0) rows_.add_exact("sink", slots.sink, options_.sink_format);
    if (slots.recent > 0) rows_.add_exact("recent", slots.recent, options_.recent_format);
    const int64_t kept = whole_tiles(int64_t{options_.evict_budget()} * options_.n_seq_max);
    const int middle = evicts ? static_cast<int>(std::min<int64_t>(slots.middle, kept)) : slots.middle;
    rows_.add_middle(middle, evicts, slots.ring);

    const Arena arena = shares ? rows_.share_memory(slots.least_exact) : Arena{};
    Placement placement(
        options_, {slots.sink, shares ? arena.most_exact : slots.recent, slots.middle, blocks ? token_block_slots : 1},
        hparams.n_layer);
    if (shares) placement.share(arena);
    if (slots.ring > 0) placement.select(std::make_unique<Ring>(slots.ring, slots.window), slots.in_ring);
    if (evicts) add_eviction(placement, slots.in_ring);
    return placement;
}

void KvCache::add_eviction(Placement& placement, const std::vector<bool>& in_ring) const {
    std::vector<bool> evicts = in_ring;
    evicts.flip();
    if (std::find(evicts.begin(), evicts.end(), true) == evicts.end()) {
        fail("evict", "expected a layer that holds the context; got sliding windows in all, which hold ",
             placement.ring()->window(), " tokens; leave out --evict");
    }
    const EvictPolicy& policy = *options_.evict.policy;
    const int share = (options_.evict.keep - options_.sink) * policy.latest_of_100 / 100;
    const int latest = policy.most_latest > 0 ? std::min(share, policy.most_latest) : share;
    const int n_recent = placement.recent() < 0 ? 0 : placement.cells(placement.recent()).capacity();
    const Eviction::Sizes sizes{options_.evict_budget(), latest,
                                rows_.regions()[static_cast<size_t>(rows_.middle())].n_slots, n_recent};
    placement.select(std::make_unique<Eviction>(policy, sizes, evicts), evicts);
}

KvBytes KvCache::bytes() const {
    KvBytes total;
    total.runs.resize(options_.runs.size(), 0);
    const Eviction* const eviction = placement_.eviction();
    for (size_t r = 0; r < rows_.regions().size(); r++) {
        const RegionRows& region = rows_.regions()[r];
        const Cells& held = placement_.cells_of_rows(static_cast<int>(r));
        size_t cells = Cells::bytes_per_slot() * static_cast<size_t>(held.capacity()) +
                       (region.is_selected ? eviction->bytes() : 0);
        if (placement_.has_tiers() && static_cast<int>(r) == placement_.recent()) {
            const size_t own = Cells::bytes_per_slot() * static_cast<size_t>(region.n_slots);
            cells = std::max(own, cells - rows_.bytes_for_cells());
        }
        total.regions.push_back({region.name, region.n_slots,
                                 region.is_selected ? eviction->most_used() : held.n_used(), region.bytes[0],
                                 region.bytes[1]});
        for (size_t i = 0; i < options_.runs.size(); i++) total.runs[i] += region.bytes_of(options_.runs[i]);
        total.k += region.bytes[0];
        total.v += region.bytes[1];
        total.cells += cells;
        // of the middle, and of the ring that all tokens share
        if (static_cast<int>(r) >= placement_.middle()) {
            total.per_token += static_cast<double>(region.total_bytes() + cells);
            total.f16_total += Cells::bytes_per_slot() * static_cast<size_t>(held.capacity());
        }
    }
    for (int il = 0; il < rows_.n_layers(); il++) {
        total.cells += rows_.mean_bytes(il);
        total.per_token += static_cast<double>(rows_.mean_bytes(il));
    }
    const auto n_slots = static_cast<size_t>(states_.n_slots());
    total.states = n_slots * states_.slot_bytes();
    total.snapshots = states_.n_copies() * states_.slot_bytes();
    total.snapshots_most =
        static_cast<size_t>(options_.n_seq_max * SequenceState::copies_of_sequence) * states_.slot_bytes();
    for (size_t i = 0; i < total.runs.size(); i++) total.runs[i] += n_slots * state_bytes_[i];
    const int middle = placement_.middle();
    total.n_cells = placement_.cells(middle).capacity();
    total.per_token /= total.n_cells;
    const auto row_bytes = [this](int region) {
        const RegionRows& rows = rows_.regions()[static_cast<size_t>(region)];
        return static_cast<double>(rows.total_bytes()) / rows.n_slots;
    };
    if (options_.recent_ratio > 0) {
        total.per_token += options_.recent_ratio * (row_bytes(placement_.recent()) - row_bytes(middle));
    }
    for (const int i : {0, 1, 2}) total.exact_at[i] = placement_.exact_of(options_.n_ctx / (4 >> i));
    for (int step = 1 << 28; step > 0; step /= 2) {
        const int64_t n = int64_t{total.all_exact} + step;
        if (n <= options_.n_ctx && placement_.exact_of(static_cast<int>(n)) == n) total.all_exact = static_cast<int>(n);
    }
    for (int il = 0; il < placement_.n_layers(); il++) {
        total.layer_slots.push_back(placement_.cells(middle, il).capacity());
    }
    total.f16_per_token = f16_bytes_ / total.n_cells;
    total.f16_total += static_cast<size_t>(f16_bytes_);
    total.share = total.per_token * total.n_cells / static_cast<double>(total.f16_total);
    return total;
}

std::vector<SlotRef> KvCache::claim(const NewTokens& tokens) {
    const auto n = static_cast<int>(tokens.size());
    if (placement_.has_tiers()) {
        placement_.check_room(tokens.size());
        // of tokens that do not all find room the latest are exact, and as many as beside all others in the middle
        const int n_exact = n <= placement_.most_exact() ? n : placement_.most_exact(n);
        make_exact_room(n_exact, n_exact == n ? 0 : n);
    } else if (placement_.takes_blocks()) {
        // guesses that were taken push tokens out late
        if (placement_.cells(placement_.recent()).n_free() < n) demote(placement_.due({}));
    }
    if (placement_.takes_blocks()) free_blocks(placement_.n_blocks(tokens));
    return placement_.claim(tokens);
}

void KvCache::free_blocks(int n) {
    const std::vector<SlotMove> moves = placement_.merges(n);
    if (moves.empty()) return;
    rows_.merge(moves);
    placement_.merge(moves);
}

bool KvCache::demote(const Placement::Leaving& leaving) {
    if (leaving.empty()) return false;
    if (placement_.takes_blocks()) free_blocks(placement_.n_blocks(leaving));
    const std::vector<RowMove> moves = placement_.demote(leaving);
    if (moves.empty()) return false;
    for (CacheDevice* device : rows_.devices()) {
        if (device != nullptr) device->move_rows(*this, placement_.recent(), placement_.middle(), moves);
    }
    for (int il = 0; il < placement_.n_layers() && rows_.on_host(il); il++) {
        rows_.demote(il, placement_.moves_of(il, moves));
    }
    placement_.leave_recent(moves);
    return true;
}

void KvCache::make_exact_room(int n_exact, int n_settling, const Guesses& guesses) {
    for (int excess; (excess = placement_.excess(n_exact, n_settling, guesses)) > 0;) {
        const int n = placement_.n_leaving(excess);
        gather_exact(n - Placement::reserve);
        if (!demote(placement_.oldest(n, guesses))) break;
    }
    gather_exact(n_settling);
    placement_.limit_cells();
}

void KvCache::gather_exact(int n_settling) {
    const std::vector<SlotMove> moves = placement_.gather(n_settling);
    if (moves.empty()) return;
    std::vector<RowMove> rows;
    for (const SlotMove& move : moves) rows.push_back({move.from, move.to, -1});
    for (CacheDevice* device : rows_.devices()) {
        if (device != nullptr) device->move_rows(*this, placement_.recent(), placement_.recent(), rows);
    }
    for (int il = 0; il < placement_.n_layers() && rows_.on_host(il); il++) rows_.move_recent(il, moves);
    placement_.gather(moves);
}

}  // namespace lkv
