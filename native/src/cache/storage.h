// Where a region's rows live: the host's memory, or a device's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/buffer.h"

namespace lkv {

class KvCache;
struct RowMove;

class CacheStorage {
public:
    virtual ~CacheStorage() = default;
    // Where kernels see the byte at `offset`, and what follows in its layer; only host storage may be dereferenced.
    virtual uint8_t* at(size_t offset) const = 0;

    // The bytes as the host can use them. `copy` holds them where they are not the host's own; store() brings changes back.
    virtual uint8_t* load(std::vector<uint8_t>& copy) const = 0;
    virtual void store(const std::vector<uint8_t>& copy) = 0;
};

class HostStorage : public CacheStorage {
public:
    explicit HostStorage(size_t bytes) : buffer_(bytes) {}
    uint8_t* at(size_t offset) const override { return buffer_.data() + offset; }
    uint8_t* load(std::vector<uint8_t>&) const override { return buffer_.data(); }
    // empty where load() gave the bytes themselves
    void store(const std::vector<uint8_t>& copy) override { std::copy(copy.begin(), copy.end(), buffer_.data()); }

private:
    Buffer buffer_;
};

// Rows of several devices, those of the first layers first.
class SplitStorage : public CacheStorage {
public:
    struct Piece {
        size_t bytes;
        std::unique_ptr<CacheStorage> storage;
    };
    explicit SplitStorage(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {}
    uint8_t* at(size_t offset) const override {
        size_t i = 0;
        for (; i + 1 < pieces_.size() && offset >= pieces_[i].bytes; i++) offset -= pieces_[i].bytes;
        return pieces_[i].storage->at(offset);
    }
    uint8_t* load(std::vector<uint8_t>& copy) const override {
        copy.clear();
        for (const Piece& piece : pieces_) {
            std::vector<uint8_t> own;
            const uint8_t* const there = piece.storage->load(own);
            copy.insert(copy.end(), there, there + piece.bytes);
        }
        return copy.data();
    }
    void store(const std::vector<uint8_t>& copy) override {
        auto from = copy.begin();
        for (const Piece& piece : pieces_) {
            const auto end = from + static_cast<ptrdiff_t>(piece.bytes);
            piece.storage->store({from, end});
            from = end;
        }
    }

private:
    std::vector<Piece> pieces_;
};

// Memory for rows on a device, and what only it can do with them.
class CacheDevice {
public:
    virtual ~CacheDevice() = default;
    virtual std::unique_ptr<CacheStorage> allocate(size_t bytes) = 0;
    // Requantizes rows of slots from one region into the middle, in every layer that the device has.
    virtual void move_rows(const KvCache& cache, int from, int to, std::span<const RowMove> slots) = 0;
    // Writes K of one layer into token blocks of the middle, 32 moves each. rows: f32 [·, K width] on the device; RowMove::from is the
    // index of a row.
    virtual void write_token_blocks(const KvCache& cache, int layer, const float* rows,
                                    std::span<const RowMove> moves) = 0;
};

}  // namespace lkv
