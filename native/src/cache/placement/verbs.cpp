// llama.cpp's sequence verbs. What a verb leaves is complete, or is taken back.
#include <algorithm>

#include "base/error.h"
#include "cache/placement/journal.h"
#include "cache/placement/placement.h"

namespace lkv {
namespace {

// As llama.cpp's verbs are given it: -1 is an open end.
std::string range_text(const Positions& positions) {
    return concat(positions.first, " to ", positions.end == Positions{}.end ? -1 : positions.end);
}

}  // namespace

bool Placement::takes_part(int seq, const Positions& positions) const {
    size_t n = 0;
    size_t n_all = 0;
    for (const Cells& cells : regions_) {
        n += cells.slots_of(seq, positions).size();
        n_all += static_cast<size_t>(cells.count(seq));
    }
    return n > 0 && n < n_all;
}

template <typename F>
void Placement::each_cells(F&& visit) {
    for (Cells& cells : regions_) visit(cells);
    for (Selection* selection : selections_) {
        if (Cells* const cells = selection->follower()) visit(*cells);
    }
}

bool Placement::is_complete(uint64_t sequences) const {
    return std::all_of(selections_.begin(), selections_.end(),
                       [&](const Selection* selection) { return selection->is_complete(*this, sequences); });
}

// Ends a verb: what it leaves is complete, or is taken back.
bool Placement::keeps(Journal& journal) {
    changed();
    if (is_complete(journal.touched())) return true;
    journal.undo();
    return false;
}

void Placement::take_out(int seq, const Positions& positions, Journal& journal) {
    each_cells([&](Cells& cells) {
        for (const int slot : cells.slots_of(seq, positions)) {
            journal.put(cells, slot, {cells.pos(slot), cells.seq(slot) & ~bit(seq)});
        }
    });
}

// A verb would bring tokens back into sight whose rows are gone.
void Placement::refuse(const char* verb, const std::string& got) const {
    if (!is_divisible()) {
        fail(verb, "expected whole sequences that stay where they are under --evict ", policy_name(),
             ", as some of their tokens are gone; use --evict none; got ", got);
    }
    fail(verb, "expected the ", ring_->window(), " tokens before a sequence's end to be those before the end of ",
         "one that was computed, as layers with a sliding window keep no others; compute them anew; got ", got);
}

bool Placement::remove(int seq, const Positions& positions) {
    if (seq >= 0) check_seq(seq);
    const uint64_t mask = seq < 0 ? sequences() : bit(seq);
    bool whole = true;
    each_sequence(is_divisible() ? 0 : mask, [&](int s) { whole = whole && !takes_part(s, positions); });
    if (!whole) return false;
    Journal journal;
    each_sequence(mask, [&](int s) { take_out(s, positions, journal); });
    if (!keeps(journal)) return false;
    each_sequence(mask & ~sequences(), [&](int s) {
        for (Selection* selection : selections_) selection->forget(s);
    });
    return true;
}

void Placement::copy(int src, int dst, const Positions& positions) {
    check_seq(src);
    check_seq(dst);
    const std::string got = concat("tokens ", range_text(positions), " of sequence ", src);
    if (!is_divisible()) refuse("seq_cp", got);
    Journal journal;
    each_cells([&](Cells& cells) {
        for (const int slot : cells.slots_of(src, positions)) {
            journal.put(cells, slot, {cells.pos(slot), cells.seq(slot) | bit(dst)});
        }
    });
    if (!keeps(journal)) refuse("seq_cp", got);
}

void Placement::shift(int seq, const Positions& positions, int32_t delta) {
    check_seq(seq);
    const std::string got = concat("positions ", range_text(positions), " of sequence ", seq, " moved by ", delta);
    if (!is_divisible()) refuse("seq_add", got);
    Journal journal;
    each_cells([&](Cells& cells) {
        for (const int slot : cells.slots_of(seq, positions)) {
            const Token to{cells.pos(slot) + delta, cells.seq(slot)};
            journal.put(cells, slot, to.pos < 0 ? Token{-1, 0} : to);
        }
    });
    if (!keeps(journal)) refuse("seq_add", got);
}

void Placement::remove_whole(int seq) {
    changed();
    Journal journal;
    take_out(seq, {}, journal);
    for (Selection* selection : selections_) selection->forget(seq);
}

void Placement::keep(int seq) {
    check_seq(seq);
    each_sequence(sequences() & ~bit(seq), [&](int s) { remove_whole(s); });
}

void Placement::clear() {
    changed();
    for (Cells& cells : regions_) cells.clear();
    for (Selection* selection : selections_) selection->clear();
}

}  // namespace lkv
