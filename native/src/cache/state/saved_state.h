// What a state says of regions, rows and tokens: nothing here knows where these go.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "cache/row.h"
#include "cache/state/bytes.h"

namespace lkv {

constexpr uint32_t state_magic = 0x53564B4C;  // "LKVS"
constexpr uint32_t state_version = 5;

// Which rows a state may have beside those of the session that takes it.
enum class Accept {
    same,   // none
    finer,  // of a sequence, in the same regions: as fine or finer, segment by segment
    any,    // whatever the same weights left: rows are coded anew
};

// Sides whose full rows are rotated in a state and not in a cache, or the reverse.
struct RowRotation {
    unsigned sides = 0;     // bit 0: K, bit 1: V
    int block[2] = {1, 1};  // channels that a rotation mixes, a power of two
};

// A position from which a sequence can go on: sums of positions and windows stay below 2^31.
constexpr bool is_position(int32_t pos) { return pos >= 0 && pos < (int32_t{1} << 30); }

constexpr const char* as_it_was_saved =
    "; use the same model, --kv, --kv-budget, --sink and --recent, and of models with sliding windows the same -c";

template <typename A, typename B>
void expect_same(const char* what, A expected, B got) {
    if (static_cast<uint64_t>(expected) != static_cast<uint64_t>(got)) {
        fail("state", "expected ", what, ' ', expected, " as in this session; got ", got, as_it_was_saved);
    }
}

// Stored segments, and after them what a group drops as one of `none`.
void put_layout(ByteWriter& out, const RowLayout& row);

// A layout with the groups of `own`, or with none. Errors: Error for others.
RowPlan get_layout(ByteReader& in, const RowLayout& own);

// Whether rows of another layout are taken; false: these are the same. Errors: Error where they are not.
bool is_coded_anew(const RowLayout& from, const RowLayout& own, Accept accept);

// A row of layout `from` is at `saved`; row: one in the layout `to`.
void put_row(const RowLayout& from, const uint8_t* saved, const RowLayout& to, uint8_t* row);

struct StateHead {
    uint64_t sequences;  // bit s: tokens of s are in it
    uint32_t n_regions;
};

// A layer's rows in a region; V without groups: they are in another one. K has none either where its keys are made of V's rows.
struct SavedLayer {
    RowPlan plan[2];
    size_t offset[2];  // in a token's bytes
    bool held() const { return plan[1].view().n_groups > 0; }
};

struct SavedToken {
    int32_t slot;
    int32_t pos;  // −1: an empty slot of a block
    uint64_t seq;
    const uint8_t* rows;

    bool is_empty() const { return pos == -1 && seq == 0; }
    bool is_of(uint64_t sequences) const { return is_position(pos) && seq != 0 && (seq & ~sequences) == 0; }
};

struct SavedRegion {
    std::string name;
    std::vector<SavedLayer> layers;
    std::vector<SavedToken> tokens;
    size_t stride;  // bytes from a token's rows to the next one's

    bool is_exact() const { return name == "sink" || name == "recent"; }

    // own(il, side): a layout with the groups that rows of this region have.
    template <typename F>
    SavedRegion(ByteReader& in, size_t n_layers, F&& own) : name(get_name(in)) {
        expect_same("layers", n_layers, in.get<uint32_t>());
        const auto n_used = in.get<uint32_t>();
        size_t row_bytes = 0;
        for (size_t il = 0; il < n_layers; il++) {
            SavedLayer layer;
            for (int side = 0; side < 2; side++) {
                layer.plan[side] = get_layout(in, own(name, il, side));
                layer.offset[side] = row_bytes;
                row_bytes += static_cast<size_t>(layer.plan[side].row_bytes());
            }
            expect_same("groups of K where V has", layer.held() && own(name, il, 0).n_groups > 0,
                        layer.plan[0].view().n_groups > 0);
            layers.push_back(std::move(layer));
        }
        read_tokens(in, n_used, row_bytes);
    }

private:
    void read_tokens(ByteReader& in, uint32_t n_used, size_t row_bytes);
};

// A state, or one of several that make a sequence.
struct StatePart {
    ByteReader in;  // after the regions
    StateHead head;
    std::vector<SavedRegion> regions;
};

}  // namespace lkv
