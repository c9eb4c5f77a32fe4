#include "cache/placement/cells.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace lkv {
namespace {

constexpr uint64_t all_bits = ~uint64_t{0};
// Half a word of Cells::occupied_ where slots come alone: as many tokens as leave the recent ones at once.
constexpr int run_slots = 32;

uint32_t half_of(const std::vector<uint64_t>& words, size_t run) {
    return static_cast<uint32_t>(words[run / 2] >> (run % 2 * run_slots));
}

}  // namespace

void Cells::allocate() {
    pos_.assign(static_cast<size_t>(capacity_), -1);
    seq_.assign(static_cast<size_t>(capacity_), 0);
    remembered_.assign(static_cast<size_t>(n_remembered_), 0);
    occupied_.assign((static_cast<size_t>(capacity_ / block_) + 63) / 64, 0);
    changes_.assign(static_cast<size_t>((capacity_ + step_slots - 1) / step_slots), 0);
}

std::vector<int32_t> Cells::changed_steps(uint64_t since) const {
    std::vector<int32_t> steps;
    for (size_t i = 0; i < changes_.size() && since != n_changes_; i++) {
        if (changes_[i] > since) steps.push_back(static_cast<int32_t>(i));
    }
    return steps;
}

int32_t Cells::first(int seq) const {
    if (!holding(seq).exact) scan(seq);
    return holding(seq).first;
}

int32_t Cells::last(int seq) const {
    if (!holding(seq).exact) scan(seq);
    return holding(seq).last;
}

void Cells::scan(int seq) const {
    Holding& held = holdings_[static_cast<size_t>(seq)];
    held.first = held.last = -1;
    const auto each_position = [&](auto&& visit) {
        for (int slot = 0; slot < end_; slot++) {
            if ((this->seq(slot) & bit(seq)) != 0) visit(pos(slot));
        }
        n_visited_ += static_cast<uint64_t>(end_);
    };
    each_position([&](int32_t at) {
        if (held.first < 0 || at < held.first) held.first = at;
        held.last = std::max(held.last, at);
    });
    held.exact = true;
    held.gapless = held.count == held.last - held.first + 1;
    if (!held.gapless) return;
    std::vector<bool> found(static_cast<size_t>(held.count));
    each_position([&](int32_t at) { found[static_cast<size_t>(at - held.first)] = true; });
    held.gapless = std::find(found.begin(), found.end(), false) == found.end();
}

std::vector<int> Cells::slots_of(int seq, const Positions& positions) const {
    std::vector<int> slots;
    const Holding& held = holding(seq);
    if (held.count == 0 || held.last < positions.first || held.first >= positions.end) return slots;
    const bool all = positions.first <= held.first && held.last < positions.end;
    if (!all && !held.exact) scan(seq);
    const int32_t first = std::max(held.first, positions.first);
    const int32_t last = std::min(held.last, positions.end - 1);
    if (last < first) return slots;
    const auto n_wanted = static_cast<size_t>(!all && held.gapless ? last - first + 1 : held.count);
    const bool down = last == held.last;
    if (!all && held.gapless && last - first < n_remembered_) {
        const int n = last - first + 1;
        slots = find(seq, down ? last : first, n, down ? -1 : 1);
        if (slots.size() == n_wanted) return slots;
        slots.clear();
        if (!down) {
            remember(seq, first);
            return find(seq, first, n, 1);
        }
    }
    // the latest tokens usually lie after the others
    int n_seen = 0;
    int n = 0;
    for (; n < end_ && n_seen < held.count && slots.size() < n_wanted; n++) {
        const int slot = down ? end_ - 1 - n : n;
        if ((this->seq(slot) & bit(seq)) == 0) continue;
        n_seen++;
        if (positions.have(pos(slot))) slots.push_back(slot);
    }
    n_visited_ += static_cast<uint64_t>(n);
    return slots;
}

void Cells::remember(int seq, int32_t first) const {
    for (int slot = 0; slot < end_; slot++) {
        const int32_t at = pos(slot);
        if ((this->seq(slot) & bit(seq)) != 0 && at >= first && at - first < n_remembered_) remembered(seq, at) = slot;
    }
    n_visited_ += static_cast<uint64_t>(end_);
}

std::vector<int> Cells::find(int seq, int32_t pos, int n, int step) const {
    std::vector<int> slots;
    for (int i = 0; i < n; i++, pos += step) {
        const int slot = remembered(seq, pos);
        n_visited_++;
        if ((this->seq(slot) & bit(seq)) == 0 || this->pos(slot) != pos) break;
        slots.push_back(slot);
    }
    return slots;
}

std::vector<int> Cells::blocks_of(uint64_t mask, const Positions& positions) const {
    std::vector<int> slots;
    n_visited_ += static_cast<uint64_t>(end_);
    for (int first = 0; first < end_; first += block_) {
        bool held = false;
        for (int slot = first; slot < first + block_; slot++) {
            held = held || ((seq(slot) & mask) != 0 && positions.have(pos(slot)));
        }
        for (int slot = first; held && slot < first + block_; slot++) slots.push_back(slot);
    }
    return slots;
}

int Cells::claim(const Token& token) {
    const int slot = find_free(token.seq);
    put(slot, token);
    return slot;
}

int Cells::find_free(uint64_t mask) {
    const bool others = block_ == 1 && (sequences_ & ~mask) != 0;
    const int in_run = others ? find_in_run(std::countr_zero(mask)) : -1;
    return in_run >= 0 ? in_run : lowest_free();
}

int Cells::find_in_run(int seq) {
    Holding& held = holdings_[static_cast<size_t>(seq)];
    if (held.newest < 0 && held.count > 0 && held.exact) {
        const std::vector<int> last = slots_of(seq, {held.last, held.last + 1});
        held.newest = last.empty() ? -1 : last.front();
    }
    if (held.newest >= 0) {
        const int run = held.newest / run_slots;
        const int slot = run * run_slots + std::countr_one(half_of(occupied_, static_cast<size_t>(run)));
        const bool goes_on = slot > run * run_slots && (this->seq(slot - 1) & bit(seq)) != 0;
        if (goes_on && slot < (run + 1) * run_slots && slot < limit_) return slot;
    }
    const auto n_runs = static_cast<size_t>((limit_ + run_slots - 1) / run_slots);
    while (first_empty_ < n_runs && half_of(occupied_, first_empty_) != 0) {
        first_empty_++;
        n_visited_++;
    }
    return first_empty_ < n_runs ? static_cast<int>(first_empty_) * run_slots : -1;
}

std::vector<int> Cells::claim(std::span<const Token> tokens) {
    const auto block = static_cast<size_t>(block_);
    const size_t n = std::min(tokens.size() / block, static_cast<size_t>(n_free()) / block) * block;
    std::vector<int> slots;
    slots.reserve(n);
    for (size_t i = 0; i < n; i++) {
        slots.push_back(i % block == 0 ? find_free(tokens[i].seq) : slots.back() + 1);
        put(slots.back(), tokens[i]);
    }
    return slots;
}

int Cells::lowest_free() {
    n_visited_++;
    for (; occupied_[first_free_] == all_bits; first_free_++) n_visited_++;
    return (static_cast<int>(first_free_) * 64 + std::countr_one(occupied_[first_free_])) * block_;
}

void Cells::put(int slot, const Token& token) {
    int32_t& pos = pos_[static_cast<size_t>(slot)];
    uint64_t& seq = seq_[static_cast<size_t>(slot)];
    const uint64_t same = pos == token.pos ? seq & token.seq : 0;
    each_sequence(seq & ~same, [&](int s) { remove(s, pos); });
    n_used_ += (token.seq != 0 ? 1 : 0) - (seq != 0 ? 1 : 0);
    pos = token.pos;
    seq = token.seq;
    each_sequence(seq & ~same, [&](int s) { add(s, token.pos, slot); });
    occupy(slot);
    end_ = seq != 0 ? std::max(end_, slot + 1) : end_;
    for (; end_ > 0 && !used(end_ - 1); end_--) n_visited_++;
}

// The block of the slot is occupied now, or free.
void Cells::occupy(int slot) {
    changes_[static_cast<size_t>(slot / step_slots)] = ++n_changes_;
    const auto block = static_cast<size_t>(slot / block_);
    const auto first = seq_.begin() + static_cast<ptrdiff_t>(block) * block_;
    const bool in_use = std::any_of(first, first + block_, [](uint64_t mask) { return mask != 0; });
    uint64_t& word = occupied_[block / 64];
    const uint64_t mark = bit(static_cast<int>(block % 64));
    if (in_use == ((word & mark) != 0)) return;
    word ^= mark;
    n_blocks_ += in_use ? 1 : -1;
    if (!in_use) first_free_ = std::min(first_free_, block / 64);
    const size_t run = block / run_slots;
    if (half_of(occupied_, run) == 0) first_empty_ = std::min(first_empty_, run);
}

void Cells::add(int seq, int32_t pos, int slot) {
    Holding& held = holdings_[static_cast<size_t>(seq)];
    remembered(seq, pos) = slot;
    if (held.count++ == 0) {
        held = {pos, pos, 1, slot, true, true};
        sequences_ |= bit(seq);
        return;
    }
    held.gapless = held.gapless && (pos == held.last + 1 || pos == held.first - 1);
    held.first = std::min(held.first, pos);
    if (pos >= held.last) held.newest = slot;
    held.last = std::max(held.last, pos);
    // the last gap may be filled
    held.exact = held.exact && (held.gapless || held.count != held.last - held.first + 1);
}

void Cells::remove(int seq, int32_t pos) {
    Holding& held = holdings_[static_cast<size_t>(seq)];
    if (pos == held.last) held.newest = -1;
    if (--held.count == 0) {
        held = {};
        sequences_ &= ~bit(seq);
    } else if (!held.gapless) {
        held.exact = held.exact && pos != held.first && pos != held.last;
    } else if (pos == held.last) {
        held.last--;
    } else if (pos == held.first) {
        held.first++;
    } else {
        held.gapless = false;
    }
}

std::vector<SlotMove> Cells::merges(int n) const {
    std::vector<std::pair<int, int>> broken;  // tokens left, first slot
    for (int first = 0; block_ > 1 && n > 0 && first < end_; first += block_) {
        const auto left = static_cast<int>(std::count_if(seq_.begin() + first, seq_.begin() + first + block_,
                                                         [](uint64_t mask) { return mask != 0; }));
        if (left > 0 && left < block_) broken.emplace_back(left, first);
    }
    if (n > 0) n_visited_ += static_cast<uint64_t>(end_);
    std::sort(broken.begin(), broken.end());
    size_t n_merged = 0;  // as many as free the most
    int n_freed = 0;
    int n_tokens = 0;
    for (size_t i = 0; i < broken.size() && n_freed < n; i++) {
        n_tokens += broken[i].first;
        const int freed = static_cast<int>(i) + 1 - (n_tokens + block_ - 1) / block_;
        if (freed > n_freed) {
            n_freed = freed;
            n_merged = i + 1;
        }
    }
    std::vector<int> blocks;
    for (size_t i = 0; i < n_merged; i++) blocks.push_back(broken[i].second);
    std::sort(blocks.begin(), blocks.end());
    std::vector<int> slots;
    for (const int first : blocks) {
        for (int slot = first; slot < first + block_; slot++) {
            if (used(slot)) slots.push_back(slot);
        }
    }
    const auto order = [this](int slot) { return std::pair(std::countr_zero(seq(slot)), pos(slot)); };
    std::sort(slots.begin(), slots.end(), [&](int a, int b) { return order(a) < order(b); });
    std::vector<SlotMove> moves;
    for (size_t i = 0; i < slots.size(); i++) {
        const auto block = static_cast<size_t>(block_);
        moves.push_back({slots[i], blocks[i / block] + static_cast<int>(i % block)});
    }
    return moves;
}

void Cells::merge(std::span<const SlotMove> moves) {
    std::vector<Token> tokens;
    for (const SlotMove& move : moves) tokens.push_back({pos(move.from), seq(move.from)});
    for (const SlotMove& move : moves) release(move.from);
    for (size_t i = 0; i < moves.size(); i++) put(moves[i].to, tokens[i]);
}

void Cells::move(const SlotMove& move) {
    const auto from = static_cast<size_t>(move.from);
    const auto to = static_cast<size_t>(move.to);
    pos_[to] = std::exchange(pos_[from], -1);
    seq_[to] = std::exchange(seq_[from], 0);
    each_sequence(seq_[to], [&](int s) {
        remembered(s, pos_[to]) = move.to;
        Holding& held = holdings_[static_cast<size_t>(s)];
        if (held.newest == move.from) held.newest = move.to;
    });
    occupy(move.from);
    occupy(move.to);
    end_ = std::max(end_, move.to + 1);
    for (; end_ > 0 && !used(end_ - 1); end_--) n_visited_++;
}

void Cells::clear() {
    std::fill(pos_.begin(), pos_.end(), -1);
    std::fill(seq_.begin(), seq_.end(), 0);
    holdings_.fill({});
    std::fill(occupied_.begin(), occupied_.end(), 0);
    std::fill(changes_.begin(), changes_.end(), ++n_changes_);
    sequences_ = 0;
    n_used_ = n_blocks_ = end_ = 0;
    first_free_ = first_empty_ = 0;
}

}  // namespace lkv
