// Restores a state that has other row formats or regions than the cache (transcode.cpp).
#pragma once

#include <span>
#include <string>
#include <vector>

#include "cache/kv_cache.h"
#include "cache/state/saved_state.h"

namespace lkv {

class Transcoder {
public:
    // saved: each region once. Tokens go to the sequence `to_seq`; -1: to their own.
    Transcoder(KvCache& cache, std::span<const SavedRegion> saved, int to_seq, const RowRotation& rotation);

    // Into free cells. What was lost, "" where nothing was. Errors: Error where there is no room, or a row that is needed is not
    // in the state; cells may be taken then.
    std::string run();

private:
    struct Source {
        const SavedRegion* region = nullptr;
        size_t index = 0;
    };
    struct Token {
        Source from;
        Source in_ring;  // the saved one, null: it is not there
        int32_t pos;
        uint64_t seq;
        int to = -1;  // region
        int slot = -1;
        int ring_slot = -1;
    };
    struct Target {
        const RegionRows* region;
        HostBytes bytes;
        std::vector<ByteRange> ranges;  // of the slots that tokens go to, whole blocks
    };
    struct Place {
        Target* target;
        int slot;  // −1: this layer has no row of the token
        bool full;
    };

    void find_in_ring();
    int exact_room();
    void choose_regions();
    void claim_cells();
    void claim_ring();
    void read_rows();
    Place place_of(const Token& token, size_t il);
    Source source_of(const Token& token, size_t il) const;
    size_t load(const Source& source, size_t il, int side);
    bool rotates(size_t il, int side) const;
    bool is_full(const Source& source, size_t il) const;
    void read(const Source& source, size_t il, int side, std::span<float> x);
    void values(std::span<const Token> tokens, size_t il, int side, size_t width, std::vector<float>& x);
    void write(size_t il, int side);
    void write_single(std::span<const Token> tokens, size_t il, int side, const LayerRows& in, uint8_t* rows);
    std::string lost();

    KvCache& cache_;
    const KvCacheOptions& options_;
    Placement& placement_;
    const Rows& rows_;
    std::span<const SavedRegion> saved_;
    RowRotation rotation_;
    const SavedRegion* ring_ = nullptr;
    std::vector<Token> tokens_;
    std::vector<Target> regions_;  // the ring last
    std::vector<uint8_t> bytes_;
    int n_compressed_ = 0;
    int n_stay_ = 0;
};

}  // namespace lkv
