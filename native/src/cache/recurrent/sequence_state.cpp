#include "cache/recurrent/sequence_state.h"

#include <algorithm>
#include <set>

#include "base/error.h"

namespace lkv {

SequenceState::SequenceState(int n_seq_max, size_t slot_bytes, int n_guesses)
    : slot_bytes_(slot_bytes), n_guesses_(n_guesses) {
    if (!is_used()) return;
    uses_.resize(static_cast<size_t>((slots_of_sequence + n_guesses) * n_seq_max), 0);
    kept_.resize(static_cast<size_t>(n_seq_max));
}

// Each sequence has its part of the slots, and gives all but one back before it claims others: there are always enough.
int SequenceState::claim_slot() {
    const auto found = std::find(uses_.begin(), uses_.end(), 0);
    if (found == uses_.end()) fail("state", "expected a free slot of ", n_slots(), "; got none");
    *found = 1;
    return static_cast<int>(found - uses_.begin());
}

void SequenceState::release(const Snapshot& snapshot) {
    if (snapshot.slot >= 0) uses_[static_cast<size_t>(snapshot.slot)]--;
}

// Snapshots that have no copy either are forgotten.
void SequenceState::drop_slots_before_last(int seq) {
    std::vector<Snapshot>& kept = of(seq);
    for (size_t i = 0; i + 1 < kept.size(); i++) {
        release(kept[i]);
        kept[i].slot = -1;
    }
    std::erase_if(kept, [](const Snapshot& s) { return s.slot < 0 && !s.is_copied(); });
}

// The slot of the sequence's present state.
int SequenceState::source_of(int seq) {
    std::vector<Snapshot>& kept = of(seq);
    drop_slots_before_last(seq);
    if (kept.empty()) kept.push_back({});
    Snapshot& last = kept.back();
    if (last.slot >= 0) return last.slot;
    last.slot = claim_slot();
    for (size_t i = 0; i < memories_.size(); i++) {
        if (last.is_copied()) {
            memories_[i]->write(last.slot, last.copy[i]->bytes());
        } else {
            memories_[i]->clear(last.slot);
        }
    }
    return last.slot;
}

SequenceState::Step SequenceState::claim(std::span<const int32_t> seq, int n_guesses) {
    Step step;
    try {
        for (const int32_t s : seq) {
            step.from.push_back(source_of(s));
            step.seq.push_back(s);
        }
        for (int s = 0; s <= std::min(n_guesses, n_guesses_); s++) {
            for (size_t i = 0; i < seq.size(); i++) step.to.push_back(claim_slot());
        }
    } catch (...) {
        abandon(step);
        throw;
    }
    return step;
}

void SequenceState::commit(const Step& step, std::span<const int32_t> ends) {
    const size_t n_seqs = step.seq.size();
    for (size_t i = 0; i < n_seqs; i++) {
        for (int s = step.n_states() - 1; s >= 0; s--) {
            const int64_t slot = step.to[static_cast<size_t>(s) * n_seqs + i];
            of(step.seq[i]).push_back({ends[i] - s, static_cast<int>(slot), {}});
        }
    }
}

void SequenceState::abandon(const Step& step) {
    for (const int64_t slot : step.to) uses_[static_cast<size_t>(slot)]--;
}

void SequenceState::keep_copy(int seq) {
    std::vector<Snapshot>& kept = of(seq);
    if (kept.empty() || kept.back().is_copied()) return;
    for (const StateMemory* memory : memories_) kept.back().copy.push_back(memory->copy(kept.back().slot));
    thin_out(kept);
}

// The more copies lie together, and the further they are from the end, the sooner one of them goes.
void SequenceState::thin_out(std::vector<Snapshot>& kept) {
    const auto is_copy = [](const Snapshot& s) { return s.is_copied(); };
    while (std::count_if(kept.begin(), kept.end(), is_copy) > copies_of_sequence) {
        size_t least = 0;
        double least_worth = 2.0;
        int32_t before = 0;
        for (size_t i = 0; i + 1 < kept.size(); i++) {
            if (!is_copy(kept[i])) continue;
            const auto next = std::find_if(kept.begin() + static_cast<ptrdiff_t>(i) + 1, kept.end(), is_copy);
            const int32_t after = next == kept.end() ? kept.back().end : next->end;
            const double worth = static_cast<double>(after - before) / (kept.back().end - before + 1);
            if (worth < least_worth) {
                least_worth = worth;
                least = i;
            }
            before = kept[i].end;
        }
        kept[least].copy.clear();
        if (kept[least].slot < 0) kept.erase(kept.begin() + static_cast<ptrdiff_t>(least));
    }
}

int32_t SequenceState::end(int seq) const {
    const std::span<const Snapshot> kept = snapshots(seq);
    return kept.empty() ? 0 : kept.back().end;
}

int32_t SequenceState::since_copy(int seq) const {
    int32_t last = 0;
    for (const Snapshot& each : snapshots(seq)) {
        if (each.is_copied()) last = each.end;
    }
    return end(seq) - last;
}

int32_t SequenceState::resumable(int seq, int32_t limit) const {
    int32_t found = 0;
    for (const Snapshot& each : snapshots(seq)) {
        if (each.end <= limit) found = each.end;
    }
    return found;
}

void SequenceState::rewind(int seq, int32_t end) {
    std::vector<Snapshot>& kept = of(seq);
    while (!kept.empty() && (kept.back().end > end || end == 0)) {
        release(kept.back());
        kept.pop_back();
    }
}

void SequenceState::copy(int src, int dst, int32_t end) {
    if (src == dst) return;
    remove(dst);
    for (const Snapshot& each : snapshots(src)) {
        if (each.end > end) break;
        // two slots may be lent: what the sequence goes on from, and no more
        Snapshot shared = each;
        if (each.end != end) shared.slot = -1;
        if (shared.slot < 0 && !shared.is_copied()) continue;
        if (shared.slot >= 0) uses_[static_cast<size_t>(shared.slot)]++;
        of(dst).push_back(std::move(shared));
    }
}

void SequenceState::clear() {
    for (std::vector<Snapshot>& kept : kept_) kept.clear();
    std::fill(uses_.begin(), uses_.end(), 0);
}

std::vector<uint8_t> SequenceState::bytes(const Snapshot& snapshot) const {
    std::vector<uint8_t> all(slot_bytes_);
    uint8_t* to = all.data();
    for (size_t i = 0; i < memories_.size(); i++) {
        const size_t n = memories_[i]->slot_bytes();
        if (snapshot.is_copied()) {
            std::copy_n(snapshot.copy[i]->bytes(), n, to);
        } else {
            memories_[i]->read(snapshot.slot, to);
        }
        to += n;
    }
    return all;
}

size_t SequenceState::n_copies() const {
    std::set<const void*> copies;
    for (const std::vector<Snapshot>& kept : kept_) {
        for (const Snapshot& each : kept) {
            if (each.is_copied()) copies.insert(each.copy.front().get());
        }
    }
    return copies.size();
}

void SequenceState::put(int seq, int32_t end, const uint8_t* bytes) {
    Snapshot put{end, -1, {}};
    for (const StateMemory* memory : memories_) {
        const size_t n = memory->slot_bytes();
        put.copy.push_back(std::make_shared<StateBytes>(std::span(bytes, n)));
        bytes += n;
    }
    of(seq).push_back(std::move(put));
    thin_out(of(seq));
}

}  // namespace lkv
