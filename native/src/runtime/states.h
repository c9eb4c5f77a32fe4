// A session's states: the cache's rows as bytes, signed with the weights that they belong to.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache/state/reader.h"
#include "model/model.h"

namespace lkv {

class States {
public:
    // rotated: whether the cache's full rows of K (bit 0) and V (bit 1) are. The others outlive this.
    States(const Model& model, KvCache& cache, unsigned rotated) : model_(model), cache_(cache), rotated_(rotated) {}

    std::vector<uint8_t> whole() const;
    std::vector<uint8_t> sequence(int seq) const;
    std::vector<std::vector<uint8_t>> parts(int seq, std::span<const int32_t> cuts) const;
    // Both say what was lost (StateReader).
    std::string set_whole(std::span<const uint8_t> state, Accept accept);
    std::string set_sequence(int seq, std::span<const std::span<const uint8_t>> parts, Accept accept);

private:
    uint64_t fingerprint(unsigned rotated) const { return model_.content_fingerprint() ^ rotated; }
    std::vector<uint8_t> with_signature(std::vector<uint8_t> rows) const;
    std::pair<std::span<const uint8_t>, RowRotation> without_signature(std::span<const uint8_t> state) const;

    const Model& model_;
    KvCache& cache_;
    unsigned rotated_;
};

}  // namespace lkv
