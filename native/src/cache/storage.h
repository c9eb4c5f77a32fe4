// Where a region's rows live: the host's memory, or a device's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"

namespace lkv {

class KvCache;
struct RowMove;

class CacheStorage {
public:
    virtual ~CacheStorage() = default;
    virtual uint8_t* data() const = 0;  // where kernels see it; only host storage may be dereferenced

    // The bytes as the host can use them. `copy` holds them where they are not the host's own; store() brings changes back.
    virtual uint8_t* load(std::vector<uint8_t>& copy) const = 0;
    virtual void store(const std::vector<uint8_t>& copy) = 0;
};

class HostStorage : public CacheStorage {
public:
    explicit HostStorage(size_t bytes) : buffer_(bytes) {}
    uint8_t* data() const override { return buffer_.data(); }
    uint8_t* load(std::vector<uint8_t>&) const override { return buffer_.data(); }
    void store(const std::vector<uint8_t>&) override {}

private:
    Buffer buffer_;
};

// Memory for rows on a device, and what only it can do with them.
class CacheDevice {
public:
    virtual ~CacheDevice() = default;
    virtual std::unique_ptr<CacheStorage> allocate(size_t bytes) = 0;
    // Rows of slots, every layer: requantized from one region into the middle.
    virtual void move_rows(const KvCache& cache, int from, int to, std::span<const RowMove> slots) = 0;
    // K of one layer into blocks of the middle, 32 moves each. rows: f32 [·, K width] on the device, RowMove::from is one's index
    virtual void write_blocks(const KvCache& cache, int layer, const float* rows, std::span<const RowMove> moves) = 0;
};

}  // namespace lkv
