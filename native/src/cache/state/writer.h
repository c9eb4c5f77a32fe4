// The cache's state as bytes: which slot holds what, and the rows of the slots in use, bit for bit.
//
//   head      u32 magic · u32 version · u64 sequences, bit s: tokens of s are in it · u32 n_regions, the ring with them
//             char[16] policy of eviction, or none · u32 tokens that a layer keeps
//   regions   each: char[16] name · u32 n_layers · u32 n_used · per layer the layouts of K and V: u32 n_groups, 0 where its rows are in
//             another region · per group u32 n_segments · per segment i32 format, i32 width
//             per used slot: i32 slot · i32 pos · u64 seq, then its K and V rows of every layer that has some there
//   kept      under eviction (kept.h)
//   states    where layers are recurrent (recurrent.h)
//
// Where tokens lie in token blocks, a block in use is saved whole: its rows hold numbers of each other. Slots without a token have
// pos −1 and seq 0. A row that sequences share is there once, and is shared again.
//
// A sequence may be saved in parts, each a state of the tokens between two positions. The ring goes with the last part; of a
// block that two parts share each has its own tokens.
#pragma once

#include <span>
#include <vector>

#include "cache/kv_cache.h"
#include "cache/state/bytes.h"

namespace lkv {

class StateWriter {
public:
    explicit StateWriter(const KvCache& cache)
        : options_(cache.options()), placement_(cache.placement()), rows_(cache.rows()), states_(cache.states()) {}

    std::vector<uint8_t> all() const;
    std::vector<uint8_t> sequence(int seq) const;
    // In parts: the tokens between each two of these positions, and from the last on. Errors: Error for cuts that do not rise; under
    // eviction for more than the whole.
    std::vector<std::vector<uint8_t>> sequence(int seq, std::span<const int32_t> cuts) const;

private:
    std::vector<std::vector<uint8_t>> parts(uint64_t mask, std::span<const Positions> parts) const;
    void put_head(uint64_t mask, ByteWriter& out) const;
    void put_regions(uint64_t mask, std::span<const Positions> parts, std::span<ByteWriter> out) const;
    void put_ring(uint64_t mask, std::span<ByteWriter> out) const;

    const KvCacheOptions& options_;
    const Placement& placement_;
    const Rows& rows_;
    const SequenceState& states_;
};

}  // namespace lkv
