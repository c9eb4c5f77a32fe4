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

// Bytes of a storage, from `begin` to before `end`.
struct ByteRange {
    size_t begin;
    size_t end;
    size_t bytes() const { return end - begin; }
};

class CacheStorage {
public:
    virtual ~CacheStorage() = default;
    // Where kernels see the byte at `offset`, and what follows in its layer; only host storage may be dereferenced.
    virtual uint8_t* at(size_t offset) const = 0;
    // The bytes where they are the host's own, else null.
    virtual uint8_t* host() const { return nullptr; }
    // Bytes between the storage and the host's memory, where they have the same offsets.
    virtual void read(std::span<const ByteRange> ranges, uint8_t* to) const = 0;
    virtual void write(std::span<const ByteRange> ranges, const uint8_t* from) = 0;
};

class HostStorage : public CacheStorage {
public:
    explicit HostStorage(size_t bytes) : buffer_(bytes) {}
    uint8_t* at(size_t offset) const override { return buffer_.data() + offset; }
    uint8_t* host() const override { return buffer_.data(); }
    void read(std::span<const ByteRange> ranges, uint8_t* to) const override {
        for (const ByteRange& of : ranges) std::copy_n(at(of.begin), of.bytes(), to + of.begin);
    }
    void write(std::span<const ByteRange> ranges, const uint8_t* from) override {
        for (const ByteRange& of : ranges) std::copy_n(from + of.begin, of.bytes(), at(of.begin));
    }

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
    void read(std::span<const ByteRange> ranges, uint8_t* to) const override {
        each_piece(ranges, [&](const Piece& piece, std::span<const ByteRange> own, size_t begin) {
            piece.storage->read(own, to + begin);
        });
    }
    void write(std::span<const ByteRange> ranges, const uint8_t* from) override {
        each_piece(ranges, [&](const Piece& piece, std::span<const ByteRange> own, size_t begin) {
            piece.storage->write(own, from + begin);
        });
    }

private:
    // use(piece, what the ranges have of it, where it begins)
    void each_piece(std::span<const ByteRange> ranges, const auto& use) const {
        size_t begin = 0;
        for (const Piece& piece : pieces_) {
            const size_t end = begin + piece.bytes;
            std::vector<ByteRange> own;
            for (const ByteRange& of : ranges) {
                if (of.begin < end && of.end > begin) {
                    own.push_back({std::max(of.begin, begin) - begin, std::min(of.end, end) - begin});
                }
            }
            if (!own.empty()) use(piece, own, begin);
            begin = end;
        }
    }

    std::vector<Piece> pieces_;
};

// A storage's bytes as the host can use them, at their own offsets: the host's own, or a copy of those that are read. A copy takes memory
// for what it holds, not for all of the storage.
class HostBytes {
public:
    HostBytes(CacheStorage& storage, size_t bytes) : storage_(&storage) {
        if (storage.host() == nullptr) copy_ = Buffer(bytes);
    }
    uint8_t* data() const { return copy_.data() != nullptr ? copy_.data() : storage_->host(); }
    void read(std::span<const ByteRange> ranges) {
        if (copy_.data() != nullptr) storage_->read(ranges, copy_.data());
    }
    void write_back(std::span<const ByteRange> ranges) {
        if (copy_.data() != nullptr) storage_->write(ranges, copy_.data());
    }

private:
    CacheStorage* storage_;
    Buffer copy_;
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
