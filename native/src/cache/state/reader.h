// What puts a state (writer.h) into a cache.
//
// A state replaces the cache, and takes its slots again, holes included; or, where it is of one sequence, that sequence or
// another, in any slots that are free: whoever saved it, all of a cache or the sequence alone.
//
// Where it is asked for, rows of other layouts are coded anew (transcode.h): those of a sequence where they are finer, or all.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "cache/kv_cache.h"
#include "cache/state/saved_state.h"

namespace lkv {

class StateReader {
public:
    // accept: which rows of others are coded anew.
    StateReader(KvCache& cache, Accept accept, const RowRotation& rotation = {})
        : cache_(cache), placement_(cache.placement()), rows_(cache.rows()), accept_(accept), rotation_(rotation) {}

    // In place of all that is in the cache. What was lost on the way, in words: "" where nothing was. Errors: Error for a state that
    // does not fit; the cache is empty then.
    std::string all(std::span<const uint8_t> state);
    // Reads a state of one sequence, in place of what `seq` has, into any free slots. Errors: as above, or no room; the sequence is
    // empty then.
    std::string sequence(int seq, std::span<const std::span<const uint8_t>> parts);

private:
    StatePart open(std::span<const uint8_t> state, int to_seq) const;
    std::vector<SavedRegion> get_regions(ByteReader& in, uint32_t n_regions) const;
    std::string put(std::span<StatePart> parts, int to_seq);
    void put_region(size_t region, std::span<const StatePart> parts, int to_seq);
    void put_region(size_t region, const SavedRegion& saved, std::span<const SavedToken> tokens, uint64_t sequences,
                    int to_seq, uint8_t* rows, std::vector<int>& slots);
    void make_room(std::span<const StatePart> parts);
    bool fits_in_place(std::span<const SavedRegion> saved, int to_seq) const;
    bool fits_memory(std::span<const SavedRegion> saved) const;
    bool check_accepted(std::span<const SavedRegion> saved) const;
    void check_whole(std::span<const StatePart> parts) const;

    KvCache& cache_;
    Placement& placement_;
    const Rows& rows_;
    Accept accept_;
    RowRotation rotation_;
};

}  // namespace lkv
