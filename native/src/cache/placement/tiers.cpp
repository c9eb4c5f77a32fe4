// Exact while there is room: which tokens leave the exact rows when these share memory with the compressed ones, and when.
#include <algorithm>
#include <bit>

#include "cache/placement/placement.h"

namespace lkv {
namespace {

// A sequence is idle, and gives up its exact tokens first, once others have had so many tokens since its last.
constexpr uint64_t idle_after = 2048;
// Tokens that leave together: a GPU holds their latents meanwhile, 10 KB a token of an 8B.
constexpr int most_leaving = 512;

}  // namespace

void Placement::share(const Arena& arena) {
    arena_ = arena;
    // of each sequence a step of guesses finds room without a demotion before it
    const int step = (most_guesses + 1) * options_.n_seq_max;
    spare_ = std::clamp(step, demotion_batch, std::max(demotion_batch, arena.least_exact / 4));
}

void Placement::limit_cells() {
    if (!arena_.is_shared()) return;
    Cells& exact = regions_[static_cast<size_t>(recent_)];
    exact.limit(arena_.exact_beside(cells(middle()).end() + reserve));
    regions_.back().limit(arena_.middle_beside(exact.end()));
}

int32_t Placement::first_exact(int seq, int32_t n_guesses) const {
    const int32_t newest = std::max(-1, cells(recent_).last(seq) - n_guesses);
    return newest - options_.window(newest + 1) + 1;
}

int Placement::exact_of(int n_tokens) const {
    const int sinks = sink_ < 0 ? 0 : std::min(n_tokens, options_.sink);
    const int others = n_tokens - sinks;
    int exact = recent_ < 0 ? 0 : std::min(others, options_.window(n_tokens));
    if (!arena_.is_shared()) return sinks + exact;
    const auto fits = [&](int n) { return n + spare_ <= arena_.target_beside(others - n + reserve); };
    for (int step = 1 << 28; step > 0; step /= 2) {
        if (exact + step <= others && fits(exact + step)) exact += step;
    }
    return sinks + exact;
}

int Placement::most_exact(int n_settling) const {
    if (!arena_.is_shared()) return options_.ubatches.exact;
    const Cells& exact = cells(recent_);
    int kept = 0;  // what several sequences share counts for each: too many never hurt
    each_sequence(exact.sequences(), [&](int s) {
        kept += std::min(exact.count(s), options_.window(exact.last(s) + 1) + demotion_batch);
    });
    kept = std::min(kept, exact.n_used());
    const Cells& middle = regions_.back();
    const int then = std::max(middle.end(), middle.n_occupied() + exact.n_used() - kept) + n_settling;
    return std::max(1, arena_.target_beside(then + reserve) - kept);
}

int Placement::excess(int n_exact, int n_settling, const Guesses& guesses) const {
    int n = cells(recent_).n_used() + n_exact;
    for (const int32_t of_sequence : guesses) n -= of_sequence;
    return n - arena_.target_beside(cells(middle()).end() + n_settling + reserve);
}

int Placement::n_leaving(int excess) const {
    const int gathered = arena_.middle_beside(cells(recent_).n_used()) - cells(middle()).end();
    const int room = std::clamp(gathered / demotion_batch * demotion_batch, reserve, most_leaving);
    return std::min((excess + demotion_batch - 1) / demotion_batch * demotion_batch, room);
}

// One scan serves all sequences.
void Placement::find_upcoming() const {
    constexpr size_t most = 2048;
    const Cells& exact = cells(recent_);
    upcoming_.assign(max_sequences, {});
    each_sequence(exact.sequences(), [&](int s) { upcoming_[static_cast<size_t>(s)].end = first_exact(s, 0); });
    for (const int slot : exact.blocks_of(all_sequences)) {
        each_sequence(exact.seq(slot), [&](int s) {
            Upcoming& of = upcoming_[static_cast<size_t>(s)];
            if (exact.pos(slot) < of.end) of.tokens.emplace_back(exact.pos(slot), slot);
        });
    }
    for (Upcoming& of : upcoming_) {
        std::sort(of.tokens.begin(), of.tokens.end());
        if (of.tokens.size() <= most) continue;
        of.tokens.resize(most);
        of.end = of.tokens.back().first + 1;
    }
}

// By position. Positions begin where those of the last call ended, as a rule, or with the first: a scan then serves many calls.
std::vector<int> Placement::exact_slots(int seq, const Positions& positions) const {
    const Cells& exact = cells(recent_);
    const Upcoming& known = upcoming_[static_cast<size_t>(seq)];
    if (positions.end > known.end) find_upcoming();
    std::vector<int> slots;
    const auto first = std::lower_bound(known.tokens.begin(), known.tokens.end(), std::pair(positions.first, 0));
    for (auto at = first; at != known.tokens.end() && at->first < positions.end; ++at) {
        if ((exact.seq(at->second) & bit(seq)) != 0 && exact.pos(at->second) == at->first) slots.push_back(at->second);
    }
    return slots;
}

Placement::Leaving Placement::oldest(int n, const Guesses& guesses) const {
    const Cells& exact = cells(recent_);
    struct Candidate {
        int seq;
        bool idle;
        int32_t from;  // the position from which on its exact tokens have not been looked at
        int32_t end;   // before its window
        int32_t age() const { return end - from; }
    };
    std::vector<Candidate> candidates;
    each_sequence(exact.sequences(), [&](int s) {
        const int32_t end = first_exact(s, guesses[static_cast<size_t>(s)]);
        const bool idle = n_claimed_ - claimed_at_[static_cast<size_t>(s)] > idle_after;
        if (exact.first(s) < end) candidates.push_back({s, idle, exact.first(s), end});
    });
    const auto is_old = [&](int slot) {
        bool old = true;
        each_sequence(exact.seq(slot),
                      [&](int s) { old = old && exact.pos(slot) < first_exact(s, guesses[static_cast<size_t>(s)]); });
        return old;
    };
    const auto block = static_cast<size_t>(cells(middle()).block());
    Leaving leaving(max_sequences);
    std::vector<bool> taken(static_cast<size_t>(exact.end()));
    int n_found = 0;
    while (n_found < n && !candidates.empty()) {
        const auto next =
            std::max_element(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
                return std::pair(a.idle, a.age()) < std::pair(b.idle, b.age());
            });
        std::vector<int>& slots = leaving[static_cast<size_t>(next->seq)];
        const int32_t until = std::min(next->end, next->from + demotion_batch);
        for (const int slot : exact_slots(next->seq, {next->from, until})) {
            if (taken[static_cast<size_t>(slot)] || !is_old(slot)) continue;
            taken[static_cast<size_t>(slot)] = true;
            slots.push_back(slot);
            n_found++;
        }
        next->from = until;
        if (next->from >= next->end) candidates.erase(next);
    }
    bool any = false;
    for (std::vector<int>& slots : leaving) {
        slots.resize(slots.size() / block * block);
        any = any || !slots.empty();
    }
    return any ? leaving : Leaving{};
}

std::vector<SlotMove> Placement::gather(int n_settling) const {
    const Cells& exact = cells(recent_);
    const int end = arena_.exact_beside(cells(middle()).end() + n_settling + reserve);
    std::vector<SlotMove> moves;
    int to = 0;
    for (int from = exact.end() - 1; from >= end; from--) {
        if (!exact.used(from)) continue;
        while (to < end && exact.used(to)) to++;
        if (to >= end) break;
        moves.push_back({from, to++});
    }
    return moves;
}

void Placement::gather(std::span<const SlotMove> moves) {
    Cells& exact = regions_[static_cast<size_t>(recent_)];
    for (const SlotMove& move : moves) {
        each_sequence(exact.seq(move.from), [&](int s) {
            std::vector<std::pair<int32_t, int>>& tokens = upcoming_[static_cast<size_t>(s)].tokens;
            const auto at = std::lower_bound(tokens.begin(), tokens.end(), std::pair(exact.pos(move.from), move.from));
            if (at != tokens.end() && at->second == move.from) at->second = move.to;
        });
        exact.move(move);
    }
    version_++;
}

}  // namespace lkv
