// The verbs of a cache's sequences: what becomes of rows and of states must be the same.
#include <algorithm>

#include "base/error.h"
#include "cache/kv_cache.h"

namespace lkv {
namespace {

constexpr const char* no_snapshot = ", as recurrent layers keep no state of single tokens; compute them anew; got ";

}  // namespace

// Whether a sequence can lose these positions. end: those before it stay.
bool KvCache::can_end_at(int seq, const Positions& removed, int32_t& end) const {
    end = placement_.last(seq) + 1;
    if (removed.first >= end || removed.end <= removed.first) return true;
    const int32_t left = placement_.last_before(seq, removed.first);
    if (removed.end < end) {  // none goes, or the state has seen what would
        return placement_.last_before(seq, removed.end) == left;
    }
    end = left + 1;
    return states_.has(seq, end);
}

bool KvCache::remove(int seq, const Positions& positions) {
    if (!states_.is_used()) return placement_.remove(seq, positions);
    if (seq >= 0) placement_.check_seq(seq);
    const uint64_t mask = seq < 0 ? placement_.sequences() : bit(seq);
    int32_t ends[max_sequences] = {};
    bool can = true;
    each_sequence(mask, [&](int s) { can = can && can_end_at(s, positions, ends[s]); });
    if (!can || !placement_.remove(seq, positions)) return false;
    each_sequence(mask, [&](int s) { states_.rewind(s, ends[s]); });
    return true;
}

void KvCache::copy(int src, int dst, const Positions& positions) {
    if (!states_.is_used()) return placement_.copy(src, dst, positions);
    placement_.check_seq(src);
    placement_.check_seq(dst);
    if (src == dst) return;
    if (placement_.last(dst) >= 0) {
        fail("seq_cp", "expected an empty sequence as the copy, as recurrent layers have one state a sequence; got ",
             placement_.last(dst) + 1, " tokens in sequence ", dst);
    }
    const int32_t end = placement_.last_before(src, positions.end) + 1;
    if (placement_.last_before(src, positions.first) >= 0 || !states_.has(src, end)) {
        fail("seq_cp", "expected all tokens of sequence ", src, ", or the first ", states_.resumable(src, end),
             no_snapshot, positions.first, " to ", positions.end == Positions{}.end ? -1 : positions.end);
    }
    placement_.copy(src, dst, positions);
    states_.copy(src, dst, end);
}

void KvCache::shift(int seq, const Positions& positions, int32_t delta) {
    if (states_.is_used()) {
        fail("context shift",
             "expected a model whose layers all attend, as a recurrent state cannot move; got one with ",
             "recurrent layers");
    }
    placement_.shift(seq, positions, delta);
}

void KvCache::keep(int seq) {
    placement_.keep(seq);
    for (int s = 0; states_.is_used() && s < options_.n_seq_max; s++) {
        if (s != seq) states_.remove(s);
    }
}

void KvCache::clear() {
    placement_.clear();
    states_.clear();
}

void KvCache::remove_whole(int seq) {
    placement_.remove_whole(seq);
    if (states_.is_used()) states_.remove(seq);
}

int32_t KvCache::resumable(int seq, int32_t limit) const {
    placement_.check_seq(seq);
    if (!states_.is_used()) return std::min(limit, placement_.last(seq) + 1);
    return states_.resumable(seq, placement_.last_before(seq, limit) + 1);
}

}  // namespace lkv
