#include "cache/state/recurrent.h"

#include "base/error.h"
#include "cache/state/saved_state.h"

namespace lkv {
namespace {

struct Saved {
    int seq;
    const SequenceState::Snapshot* snapshot;
};

// After tokens at these positions: the last, and copies.
std::vector<Saved> saved_of(const SequenceState& states, uint64_t mask, const Positions& positions) {
    std::vector<Saved> saved;
    each_sequence(mask, [&](int seq) {
        const auto snapshots = states.snapshots(seq);
        for (const SequenceState::Snapshot& each : snapshots) {
            const bool is_kept = each.is_copied() || &each == &snapshots.back();
            if (is_kept && each.end > 0 && positions.have(each.end - 1)) saved.push_back({seq, &each});
        }
    });
    return saved;
}

}  // namespace

void put_recurrent(const SequenceState& states, uint64_t mask, const Positions& positions, ByteWriter& out) {
    if (!states.is_used()) return;
    const std::vector<Saved> saved = saved_of(states, mask, positions);
    out.put(static_cast<uint64_t>(states.slot_bytes()));
    out.put(static_cast<uint32_t>(saved.size()));
    for (const Saved& each : saved) {
        out.put(static_cast<int32_t>(each.seq));
        out.put(each.snapshot->end);
        const std::vector<uint8_t> bytes = states.bytes(*each.snapshot);
        out.put(bytes.data(), bytes.size());
    }
}

void get_recurrent(ByteReader& in, uint64_t sequences, int to_seq, KvCache& cache) {
    SequenceState& states = cache.states();
    if (!states.is_used()) return;
    expect_same("bytes of a recurrent state", states.slot_bytes(), in.get<uint64_t>());
    const auto n = in.get<uint32_t>();
    for (uint32_t i = 0; i < n; i++) {
        const auto saved_seq = in.get<int32_t>();
        const auto end = in.get<int32_t>();
        const uint8_t* const bytes = in.take(states.slot_bytes());
        if (saved_seq < 0 || saved_seq >= max_sequences || (sequences & bit(saved_seq)) == 0) {
            fail("state", "expected recurrent states of the sequences ", sequences, "; got one of ", saved_seq);
        }
        const int seq = to_seq < 0 ? saved_seq : to_seq;
        const int32_t before = states.end(seq);
        if (end <= before || end > cache.placement().last(seq) + 1) {
            fail("state", "expected recurrent states after rising positions up to ", cache.placement().last(seq) + 1,
                 "; got one after ", end, ", which follows ", before);
        }
        states.put(seq, end, bytes);
    }
}

void check_recurrent(const KvCache& cache) {
    if (!cache.states().is_used()) return;
    each_sequence(cache.placement().sequences(), [&](int seq) {
        const int32_t end = cache.placement().last(seq) + 1;
        if (cache.states().end(seq) == end) return;
        fail("state", "expected the recurrent state after the last token of sequence ", seq, ", at ", end,
             "; got one at ", cache.states().end(seq));
    });
}

}  // namespace lkv
