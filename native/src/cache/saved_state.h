// A state's bytes as they are read and written, and what of them stands for rows: nothing here knows where rows go.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "cache/row.h"

namespace lkv {

class StateWriter {
public:
    template <typename T>
    void put(T value) {
        put(&value, sizeof value);
    }
    void put(const void* data, size_t n) {
        const auto* p = static_cast<const uint8_t*>(data);
        bytes_.insert(bytes_.end(), p, p + n);
    }
    std::vector<uint8_t> take() { return std::move(bytes_); }

private:
    std::vector<uint8_t> bytes_;
};

class StateReader {
public:
    explicit StateReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}
    template <typename T>
    T get() {
        T value;
        std::memcpy(&value, take(sizeof value), sizeof value);
        return value;
    }
    // The next n bytes, which stay the state's.
    const uint8_t* take(size_t n) {
        if (n > bytes_.size()) {
            fail("state", "expected ", n, " more bytes; got ", bytes_.size());
        }
        const uint8_t* const at = bytes_.data();
        bytes_ = bytes_.subspan(n);
        return at;
    }
    bool done() const { return bytes_.empty(); }

private:
    std::span<const uint8_t> bytes_;
};

constexpr size_t name_bytes = 16;  // of a region, of a policy of eviction

void put_name(StateWriter& out, const std::string& name);
std::string get_name(StateReader& in);

// Which rows a state may have beside those of the session that takes it.
enum class Accept {
    same,   // none
    finer,  // of a sequence, in the same regions: as fine or finer, segment by segment
    any,    // whatever the same weights left: rows are coded anew
};

constexpr const char* as_it_was_saved =
    "; use the same model, --kv, --kv-budget, --sink and --recent, and of models with sliding windows the same -c";

template <typename A, typename B>
void expect_same(const char* what, A expected, B got) {
    if (static_cast<uint64_t>(expected) != static_cast<uint64_t>(got)) {
        fail("state", "expected ", what, ' ', expected, " as in this session; got ", got, as_it_was_saved);
    }
}

// Stored segments, and behind them what a group drops as one of `none`.
void put_layout(StateWriter& out, const RowLayout& row);

// A layout with the groups of `own`, or with none. Errors: Error for others.
RowPlan get_layout(StateReader& in, const RowLayout& own);

bool same_layout(const RowLayout& a, const RowLayout& b);

struct StateHead {
    uint64_t sequences;  // bit s: tokens of s are in it
    uint32_t n_regions;
};

// A layer's rows in a region; K and V without groups: they are in another one.
struct SavedLayer {
    RowPlan plan[2];
    size_t offset[2];  // in a token's bytes
    bool held() const { return plan[0].view().n_groups > 0; }
};

struct SavedToken {
    int32_t slot;
    int32_t pos;  // −1: an empty slot of a block
    uint64_t seq;
    const uint8_t* rows;
};

struct SavedRegion {
    std::string name;
    std::vector<SavedLayer> layers;
    std::vector<SavedToken> tokens;
    size_t stride;  // bytes from a token's rows to the next one's

    // own(il, side): a layout with the groups that rows of this region have.
    template <typename F>
    SavedRegion(StateReader& in, size_t n_layers, F&& own) : name(get_name(in)) {
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
            expect_same("groups of V where K has", layer.held(), layer.plan[1].view().n_groups > 0);
            layers.push_back(std::move(layer));
        }
        read_tokens(in, n_used, row_bytes);
    }

private:
    void read_tokens(StateReader& in, uint32_t n_used, size_t row_bytes);
};

// A state, or one of several that make a sequence.
struct StatePart {
    StateReader in;
    StateHead head;
    std::vector<SavedRegion> regions;
};

}  // namespace lkv
