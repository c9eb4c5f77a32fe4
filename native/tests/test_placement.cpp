// Where tokens are: what cells remember of sequences agrees with what their slots hold, and no decoded token makes the host look at
// more cells in a long context than in a short one.
#include <algorithm>
#include <array>
#include <ctime>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cache/evict/policies.h"
#include "cache/kv_cache.h"
#include "check.h"

namespace {

using lkv::bit;
using lkv::Cells;
using lkv::Positions;

// What a scan of all slots says.
struct Scanned {
    std::vector<int32_t> positions;  // sorted
    std::set<int> slots;             // of the range
};

Scanned scan(const Cells& cells, int seq, const Positions& range) {
    Scanned found;
    for (int slot = 0; slot < cells.capacity(); slot++) {
        if ((cells.seq(slot) & bit(seq)) == 0) continue;
        found.positions.push_back(cells.pos(slot));
        if (range.have(cells.pos(slot))) found.slots.insert(slot);
    }
    std::sort(found.positions.begin(), found.positions.end());
    return found;
}

void check_agrees(const Cells& cells, int seq, const Positions& range) {
    const Scanned want = scan(cells, seq, range);
    const std::vector<int> got = cells.slots_of(seq, range);
    CHECK(std::set<int>(got.begin(), got.end()) == want.slots && got.size() == want.slots.size());
    CHECK(cells.count(seq) == static_cast<int>(want.positions.size()));
    CHECK(cells.first(seq) == (want.positions.empty() ? -1 : want.positions.front()));
    CHECK(cells.last(seq) == (want.positions.empty() ? -1 : want.positions.back()));
    CHECK(((cells.sequences() & bit(seq)) != 0) == !want.positions.empty());
}

// Tokens come, go, are lent and move in any order; positions repeat and leave gaps.
void cells_remember() {
    std::mt19937 random(7);
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    for (const auto& [block, n_remembered] : {std::pair{1, 256}, std::pair{4, 256}, std::pair{1, 8}}) {
        Cells cells(48, block, n_remembered);
        cells.allocate();
        for (int step = 0; step < 10000; step++) {
            const int seq = below(3);
            const int slot = below(cells.capacity());
            const int what = below(6);
            if (what < 2 && cells.n_free() > 0) {
                const int32_t next = cells.last(seq) + 1 + below(2) * below(3);
                cells.put(cells.find_free(bit(seq)), {next, bit(seq)});
            } else if (what == 2 && cells.used(slot)) {
                cells.put(slot, {cells.pos(slot), cells.seq(slot) ^ bit(seq)});
            } else if (what == 3) {
                cells.put(slot, {below(60), bit(seq) | bit(below(3))});
            } else if (what == 4 && cells.used(slot)) {
                cells.put(slot, {std::max(0, cells.pos(slot) - below(5)), cells.seq(slot)});
            } else {
                cells.release(slot);
            }
            if (below(400) == 0) cells.clear();
            check_agrees(cells, below(3), Positions{below(60), below(2) == 0 ? INT32_MAX : below(70)});
        }
    }
}

struct Kind {
    const char* name;
    int n_sequences = 1;
    void (*set)(lkv::HParams&, lkv::CacheSpec&, lkv::KvCacheOptions&) = [](auto&, auto&, auto&) {};
};

const Kind kinds[] = {
    {"plain"},
    {"windows", 1, [](auto&, auto&, auto& options) { options.sink = 4, options.recent = 64; }},
    {"share", 1, [](auto&, auto&, auto& options) { options.sink = 4, options.recent_ratio = 0.1; }},
    {"ring", 1, [](auto& hparams, auto&, auto&) { hparams.block.layers[1].window = 64; }},
    {"blocks", 1,
     [](auto&, auto& spec, auto& options) {
         spec.layers[0].k.segments = {{32}};
         spec.layers[0].k.formats = {{{lkv::Format::c4}}};
         options.recent = 64;
     }},
    {"eviction", 1,
     [](auto&, auto&, auto& options) {
         options.evict = {lkv::find_policy("h2o"), 256};
         options.recent = 32;
     }},
    {"sequences", 4, [](auto&, auto&, auto& options) { options.sink = 4, options.recent = 64; }},
    {"sequences, ring", 4, [](auto& hparams, auto&, auto&) { hparams.block.layers[1].window = 64; }},
};

lkv::KvCache cache_of(const Kind& kind, int n_ctx) {
    lkv::HParams hparams;
    lkv::CacheSpec spec;
    lkv::KvCacheOptions options;
    hparams.n_layer = 2;
    hparams.n_head = 1;
    hparams.n_embd = 32;
    hparams.heads.assign(2, {1, 32, 32});
    hparams.block.layers.resize(2);
    spec.layers.resize(2);
    for (lkv::LayerCacheSpec& layer : spec.layers) {
        layer.k.ranks = layer.v.ranks = {32};
        layer.k.segments = layer.v.segments = {{16, 16}};
        layer.k.formats = layer.v.formats = {{{lkv::Format::q4, lkv::Format::none}}};
    }
    options.n_ctx = n_ctx;
    options.ubatches = {32, 32};
    options.n_seq_max = kind.n_sequences;
    kind.set(hparams, spec, options);
    return {hparams, spec, options};
}

// One ubatch as a session runs it: n tokens of each sequence, the last n_guesses of which may be taken back.
void step(lkv::KvCache& cache, int n_sequences, int n, int n_guesses = 0) {
    lkv::Placement& placement = cache.placement();
    std::vector<int32_t> pos;
    std::vector<int32_t> seq;
    for (int s = 0; s < n_sequences; s++) {
        const int32_t first = placement.last(s) + 1;
        for (int i = 0; i < n; i++) {
            pos.push_back(first + i);
            seq.push_back(s);
        }
    }
    cache.claim({pos, seq, false});
    lkv::Guesses guesses{};
    std::fill_n(guesses.begin(), n_sequences, n_guesses);
    cache.demote(guesses);
}

struct Cost {
    double visited;  // cells, per step
    double ns;       // of processor time
};

template <typename F>
Cost cost_of(const lkv::KvCache& cache, int n_steps, F&& one) {
    const uint64_t before = cache.placement().n_visited();
    const std::clock_t start = std::clock();
    for (int i = 0; i < n_steps; i++) one();
    return {static_cast<double>(cache.placement().n_visited() - before) / n_steps,
            1e9 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC / n_steps};
}

struct Costs {
    Cost decode;
    Cost draft;  // four tokens of the first sequence, of which two are taken back
};

Costs costs_at(const Kind& kind, int n_ctx) {
    lkv::KvCache cache = cache_of(kind, n_ctx);
    const int n_steps = 256;
    const int n_filled = n_ctx - n_steps * (kind.n_sequences + 2) - 64;
    while (cache.placement().n_used() < n_filled) step(cache, kind.n_sequences, 32 / kind.n_sequences);
    Costs costs{};
    costs.decode = cost_of(cache, n_steps, [&] {
        step(cache, kind.n_sequences, 1);
        CHECK(cache.placement().last(0) > 0);
    });
    if (cache.placement().eviction() != nullptr) return costs;  // which takes no guesses
    costs.draft = cost_of(cache, n_steps, [&] {
        step(cache, 1, 4, 3);
        CHECK(cache.placement().remove(0, {cache.placement().last(0) - 1}));
    });
    return costs;
}

void decoding_costs_no_more_in_a_long_context() {
    for (const Kind& kind : kinds) {
        const Costs at_1k = costs_at(kind, 2048);
        const Costs at_128k = costs_at(kind, 1 << 17);
        std::printf(
            "%-16s decode: %6.1f cells, %5.0f ns at 2K, %6.1f cells, %5.0f ns at 128K;  draft: %6.1f, %5.0f; %6.1f, "
            "%5.0f\n",
            kind.name, at_1k.decode.visited, at_1k.decode.ns, at_128k.decode.visited, at_128k.decode.ns,
            at_1k.draft.visited, at_1k.draft.ns, at_128k.draft.visited, at_128k.draft.ns);
        CHECK(at_1k.decode.visited > 0);
        CHECK(at_128k.decode.visited <= 1.5 * at_1k.decode.visited + 16);
        CHECK(at_128k.draft.visited <= 1.5 * at_1k.draft.visited + 16);
    }
}

// n more tokens of a sequence, where the cache has room for them.
bool grow(lkv::KvCache& cache, int seq, int n) {
    std::vector<int32_t> pos;
    for (int i = 0; i < n; i++) pos.push_back(cache.placement().last(seq) + 1 + i);
    try {
        cache.placement().check_room(pos.size());
    } catch (const lkv::Error&) {
        return false;
    }
    cache.claim({pos, std::vector<int32_t>(pos.size(), seq), false});
    cache.demote();
    return true;
}

// Whatever is removed, copied and shifted: token blocks take every context that single tokens do, and count the same cells.
void token_blocks_take_what_single_tokens_do() {
    const auto set_blocks = [](auto&, auto& spec, auto& options) {
        spec.layers[0].k.segments = {{32}};
        spec.layers[0].k.formats = {{{lkv::Format::c4}}};
        options.sink = 4;
        options.recent = 1;
    };
    const Kind blocks{"blocks", 4, set_blocks};
    const Kind windows{"blocks, windows", 4, [](auto& hparams, auto& spec, auto& options) {
                           kinds[4].set(hparams, spec, options);
                           options.sink = 4;
                           options.recent = 48;
                       }};
    const Kind single{"single", 4};
    for (const Kind& kind : {blocks, windows}) {
        lkv::KvCache in_blocks = cache_of(kind, 700);
        lkv::KvCache alone = cache_of(single, 700);
        std::mt19937 random(11);
        const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
        int n_broken = 0;  // claims that find less room if what is left of blocks is occupied
        int n_wrong = 0;
        for (int i = 0; i < 6000; i++) {
            const int seq = below(4);
            const int32_t at = below(std::max(1, alone.placement().last(seq) + 1));
            const int n = 1 + below(32);
            const int what = below(16);
            const bool moves = below(20) == 0;
            if (what < 11) {
                int n_occupied = 0;
                for (int r = 0; r <= in_blocks.placement().middle(); r++) {
                    n_occupied += in_blocks.placement().cells(r).n_occupied();
                }
                const bool fits = grow(alone, seq, n);
                n_wrong += grow(in_blocks, seq, n) == fits ? 0 : 1;
                n_broken += fits && n_occupied + n > 700 ? 1 : 0;
                continue;
            }
            for (lkv::KvCache* const cache : {&in_blocks, &alone}) {
                const Positions end{at, what == 11 ? at + n : INT32_MAX};
                if (what <= 13) {
                    CHECK(cache->remove(seq, end));
                } else if (what == 14) {
                    CHECK(cache->remove((seq + 1) % 4));
                    cache->copy(seq, (seq + 1) % 4, {0, at});
                } else if (moves) {
                    cache->keep(seq);
                    CHECK(cache->remove(seq, {at, at + n}));
                    cache->shift(seq, {at + n}, -n);
                }
            }
            for (int s = 0; s < 4; s++) {
                n_wrong += in_blocks.placement().last(s) == alone.placement().last(s) ? 0 : 1;
                n_wrong += in_blocks.placement().first(s) == alone.placement().first(s) ? 0 : 1;
            }
            n_wrong += in_blocks.placement().n_used() == alone.placement().n_used() ? 0 : 1;
        }
        std::printf("%-16s %d claims went where blocks were broken\n", kind.name, n_broken);
        CHECK(n_wrong == 0);
        CHECK(n_broken > 50);
    }
}

// Tokens that two sequences share are exact until both have a window of newer ones.
void shared_tokens_stay_as_long_as_one_needs_them() {
    const Kind kind{"windows", 2,
                    [](auto&, auto&, auto& options) { options.recent = 64, options.fixed_window = true; }};
    lkv::KvCache cache = cache_of(kind, 1024);
    const Cells& recent = cache.placement().cells(cache.placement().recent());
    for (const int n : {32, 28}) CHECK(grow(cache, 0, n));
    cache.copy(0, 1, {});
    for (int i = 0; i < 5; i++) CHECK(grow(cache, 0, 32));
    CHECK(recent.count(1) == 60);
    for (int i = 0; i < 5; i++) CHECK(grow(cache, 1, 32));
    CHECK(recent.first(0) >= 60 && recent.first(1) >= 60);
}

// A sequence goes back as far as all rows of its window are there, and not one token further.
void a_window_that_misses_a_row_is_refused() {
    lkv::KvCache cache = cache_of(kinds[3], 2048);
    lkv::Placement& placement = cache.placement();
    while (placement.n_used() < 1024) step(cache, 1, 32);
    const int32_t first = placement.ring()->cells().first(0);
    const int32_t least = first + placement.ring()->window() - 1;
    CHECK(first > 0);
    CHECK(!placement.remove(0, {least - 1}));
    CHECK(placement.last(0) == 1023);
    CHECK(placement.remove(0, {least}));
    CHECK(placement.last(0) == least - 1);
}

// The counter sees a scan.
void a_scan_is_counted() {
    lkv::KvCache cache = cache_of(kinds[0], 2048);
    while (cache.placement().n_used() < 1024) step(cache, 1, 32);
    const uint64_t before = cache.placement().n_visited();
    (void)cache.placement().cells(0).blocks_of(lkv::all_sequences);
    CHECK(cache.placement().n_visited() - before == 1024);
}

// A batch of one token of the first sequence and more of the second than its layers have room for.
bool is_refused(lkv::Placement& placement, int n) {
    std::vector<int32_t> pos{placement.last(0) + 1};
    std::vector<int32_t> seq{0};
    for (int i = 0; i < n; i++) {
        pos.push_back(placement.last(1) + 1 + i);
        seq.push_back(1);
    }
    try {
        placement.claim({pos, seq, false});
    } catch (const lkv::Error&) {
        return true;
    }
    return false;
}

bool hold_the_same(const lkv::Placement& a, const lkv::Placement& b) {
    bool same = true;
    for (int il = 0; il < a.n_layers(); il++) {
        const Cells& of_a = a.cells(a.middle(), il);
        const Cells& of_b = b.cells(b.middle(), il);
        same = same && of_a.end() == of_b.end();
        for (int slot = 0; same && slot < of_a.end(); slot++) {
            same = of_a.pos(slot) == of_b.pos(slot) && of_a.seq(slot) == of_b.seq(slot);
        }
    }
    return same;
}

void a_refused_batch_leaves_no_trace() {
    const Kind evicting{"keyformer", 2,
                        [](auto&, auto&, auto& options) { options.evict = {lkv::find_policy("keyformer"), 96}; }};
    const Kind both{"keyformer, ring", 2, [](auto& hparams, auto&, auto& options) {
                        hparams.block.layers[1].window = 64;
                        options.evict = {lkv::find_policy("keyformer"), 96};
                    }};
    const Kind ring{"ring", 2, [](auto& hparams, auto&, auto&) { hparams.block.layers[1].window = 64; }};
    for (const Kind& kind : {evicting, both, ring}) {
        lkv::KvCache with = cache_of(kind, 1024);
        lkv::KvCache without = cache_of(kind, 1024);
        for (int i = 0; i < 12; i++) {
            for (lkv::KvCache* const cache : {&with, &without}) {
                const int n = i % 3 == 0 ? 16 : 1;
                step(*cache, 2, n);
                if (cache == &with) CHECK(is_refused(cache->placement(), 300));
            }
            CHECK(hold_the_same(with.placement(), without.placement()));
            const lkv::Eviction* const a = with.placement().eviction();
            const lkv::Eviction* const b = without.placement().eviction();
            for (size_t t = 0; a != nullptr && t < a->weights().size(); t++) {
                CHECK(a->weights()[t].temperature == b->weights()[t].temperature);
            }
            for (int s = 0; a != nullptr && s < 2; s++)
                CHECK(a->n_decoded(s) == b->n_decoded(s) && b->n_decoded(s) <= 8);
        }
    }
}

// Sequences that grow together, some of whose last tokens are taken back, do not mix in runs of 32 slots; until there is no other room.
void sequences_keep_runs() {
    constexpr int n_seq = 12;
    constexpr int run = 32;
    Cells cells(80 * run);
    cells.allocate();
    std::array<int32_t, n_seq> length{};
    const auto grow = [&](int seq) {
        cells.claim(std::array{lkv::Token{length[static_cast<size_t>(seq)]++, bit(seq)}});
    };
    for (int i = 0; i < 100; i++) grow(0);  // a prompt
    for (int step = 0; step < 150; step++) {
        for (int seq = 0; seq < n_seq; seq++) {
            for (int i = 0; i < 1 + 3 * (seq % 2); i++) grow(seq);
            if (seq % 2 == 0) continue;
            int32_t& end = length[static_cast<size_t>(seq)];
            for (const int slot : cells.slots_of(seq, {end - 3, end})) cells.release(slot);
            end -= 3;
        }
    }
    for (int first = 0; first < cells.end(); first += run) {
        uint64_t holds = 0;
        for (int slot = first; slot < first + run; slot++) holds |= cells.seq(slot);
        CHECK((holds & (holds - 1)) == 0);
    }
    CHECK(cells.end() <= 100 + n_seq * (150 + run));
    while (cells.n_free() > 0) grow(static_cast<int>(cells.n_used() % n_seq));
    CHECK(cells.n_used() == cells.capacity() && cells.end() == cells.capacity());
}

// Exact and compressed rows of one to seven share memory, and 2048 tokens come that all are to be exact. Tokens leave by 128 at first, which
// is all that a full memory has room for; then by as many as the room that they left takes.
void a_long_prompt_pushes_out_few_batches() {
    lkv::PlacementOptions options;
    options.n_ctx = 32768;
    options.recent = 256;
    lkv::Placement placement(options, {0, 6144, options.n_ctx, 1}, 1);
    constexpr int exact_page = 7 * 128;
    constexpr int middle_page = 128;
    placement.share({{{48 * exact_page, exact_page, middle_page}}, 384, 6144});
    placement.allocate();
    int32_t next = 0;
    const auto make_room = [&](int n_new) {
        int batches = 0;
        for (int excess; (excess = placement.excess(n_new, 0, {})) > 0; batches++) {
            const int n = placement.n_leaving(excess);
            const std::vector<lkv::SlotMove> gathered = placement.gather(n - lkv::Placement::reserve);
            if (!gathered.empty()) placement.gather(gathered);
            const std::vector<lkv::RowMove> moves = placement.demote(placement.oldest(n, {}));
            CHECK(!moves.empty());
            if (moves.empty()) return batches;
            placement.leave_recent(moves);
        }
        const std::vector<lkv::SlotMove> gathered = placement.gather(0);
        if (!gathered.empty()) placement.gather(gathered);
        placement.limit_cells();
        return batches;
    };
    int most = 0;
    for (int step = 0; step < 12; step++) {
        most = std::max(most, make_room(2048));
        std::vector<int32_t> pos(2048);
        for (int32_t& of : pos) of = next++;
        const std::vector<int32_t> seq(pos.size(), 0);
        (void)placement.claim({pos, seq, false});
        CHECK(placement.fit(placement.cells(placement.recent()).end(), placement.cells(placement.middle()).end()));
        CHECK(placement.cells(placement.recent()).n_used() + placement.cells(placement.middle()).n_used() == next);
        CHECK(placement.cells(placement.recent()).first(0) == placement.cells(placement.middle()).last(0) + 1);
    }
    CHECK(most > 1 && most <= 7);
}

}  // namespace

int main() {
    cells_remember();
    sequences_keep_runs();
    a_refused_batch_leaves_no_trace();
    token_blocks_take_what_single_tokens_do();
    decoding_costs_no_more_in_a_long_context();
    shared_tokens_stay_as_long_as_one_needs_them();
    a_window_that_misses_a_row_is_refused();
    a_scan_is_counted();
    a_long_prompt_pushes_out_few_batches();
    return lkv::test::report("test_placement");
}
