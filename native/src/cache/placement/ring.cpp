#include "cache/placement/ring.h"

#include <algorithm>

#include "base/error.h"
#include "cache/placement/placement.h"

namespace lkv {
namespace {

constexpr int least_freed = 64;  // slots that are given back at once: a device copies the cells anew each time

// How far a token is from the nearest of its sequences' next ones.
int32_t distance_of(const Placement& all, const Token& token) {
    int32_t distance = INT32_MAX;
    each_sequence(token.seq, [&](int s) { distance = std::min(distance, all.last(s) + 1 - token.pos); });
    return distance;
}

}  // namespace

bool Ring::is_seen_again(const Placement& all, const Token& token) const { return distance_of(all, token) < window_; }

bool Ring::make_room(const Placement& all, int n) {
    if (cells_.n_free() >= n) return false;
    std::vector<std::pair<int32_t, int>> gone;  // a token's distance, its slot
    for (const int slot : cells_.blocks_of(all_sequences)) {
        const int32_t distance = distance_of(all, {cells_.pos(slot), cells_.seq(slot)});
        if (distance >= window_) gone.emplace_back(distance, slot);
    }
    if (const int most = cells_.n_free() + static_cast<int>(gone.size()); most < n) {
        fail("context", "expected room for ", n, " tokens in the windows of ", all.options().n_seq_max,
             " sequences; raise n_seq_max; got ", most);
    }
    std::sort(gone.begin(), gone.end(), std::greater<>());
    const int wanted = std::max(n, least_freed) - cells_.n_free();
    for (size_t i = 0; i < gone.size() && static_cast<int>(i) < wanted; i++) {
        cells_.release(gone[i].second);
    }
    return true;
}

// Which new tokens get a slot: of those that settle the latest of each sequence, all that its next token sees.
std::vector<bool> Ring::reached(const Placement& all, const NewTokens& tokens) const {
    const PlacementOptions& options = all.options();
    std::vector<bool> in(tokens.size(), true);
    if (!tokens.settles) return in;
    const int share = tokens.size() <= static_cast<size_t>(options.ubatches.longest)
                          ? options.ubatches.longest  // they may see each other there
                          : std::max(window_, cells_.capacity() / options.n_seq_max);
    std::vector<int32_t> last(max_sequences, -1);
    for (size_t i = 0; i < tokens.size(); i++) last[static_cast<size_t>(tokens.seq[i])] = tokens.pos[i];
    for (size_t i = 0; i < tokens.size(); i++) in[i] = last[static_cast<size_t>(tokens.seq[i])] - tokens.pos[i] < share;
    return in;
}

bool Ring::prepare(const Placement& all, const NewTokens& tokens) {
    const std::vector<bool> in = reached(all, tokens);
    return make_room(all, static_cast<int>(std::count(in.begin(), in.end(), true)));
}

bool Ring::enter(const Placement& all, const NewTokens& tokens, std::span<SlotRef> slots) {
    const std::vector<bool> in = reached(all, tokens);
    for (size_t i = 0; i < slots.size(); i++) {
        if (slots[i].region == all.middle() && in[i]) slots[i].ring = cells_.claim(tokens[i]);
    }
    return false;
}

void Ring::demote(const Placement& all, std::span<RowMove> moves) {
    const Cells& recent = all.cells(all.recent());
    const auto token_of = [&](const RowMove& move) { return Token{recent.pos(move.from), recent.seq(move.from)}; };
    const auto is_wanted = [&](const RowMove& move) { return is_seen_again(all, token_of(move)); };
    make_room(all, static_cast<int>(std::count_if(moves.begin(), moves.end(), is_wanted)));
    for (RowMove& move : moves) {
        if (is_wanted(move)) move.ring = cells_.claim(token_of(move));
    }
}

void Ring::release(const SlotRef& at) {
    if (at.ring >= 0) cells_.release(at.ring);
}

bool Ring::is_complete(const Placement& all, uint64_t sequences) const {
    bool complete = true;
    each_sequence(sequences & all.sequences(), [&](int s) {
        const Positions seen{std::max(0, all.last(s) + 2 - window_), INT32_MAX};
        const auto positions = [&](const Cells& cells) {
            std::vector<int32_t> found;
            for (const int slot : cells.slots_of(s, seen)) found.push_back(cells.pos(slot));
            std::sort(found.begin(), found.end());
            return found;
        };
        complete = complete && positions(cells_) == positions(all.cells(all.middle()));
    });
    return complete;
}

}  // namespace lkv
