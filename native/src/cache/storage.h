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
    void store(const std::vector<uint8_t>&) override {}

private:
    Buffer buffer_;
};

// Rows of the first layers on the host, behind them those of the others on a device.
class SplitStorage : public CacheStorage {
public:
    SplitStorage(size_t host_bytes, std::unique_ptr<CacheStorage> device)
        : host_bytes_(host_bytes), host_(host_bytes), device_(std::move(device)) {}
    uint8_t* at(size_t offset) const override {
        return offset < host_bytes_ ? host_.at(offset) : device_->at(offset - host_bytes_);
    }
    uint8_t* load(std::vector<uint8_t>& copy) const override {
        std::vector<uint8_t> device;
        const uint8_t* const there = device_->load(device);
        copy.assign(host_.at(0), host_.at(0) + host_bytes_);
        copy.insert(copy.end(), there, there + device.size());
        return copy.data();
    }
    void store(const std::vector<uint8_t>& copy) override {
        const auto border = copy.begin() + static_cast<ptrdiff_t>(host_bytes_);
        std::copy(copy.begin(), border, host_.at(0));
        device_->store({border, copy.end()});
    }

private:
    size_t host_bytes_;
    HostStorage host_;
    std::unique_ptr<CacheStorage> device_;
};

// Memory for rows on a device, and what only it can do with them.
class CacheDevice {
public:
    virtual ~CacheDevice() = default;
    virtual std::unique_ptr<CacheStorage> allocate(size_t bytes) = 0;
    // Rows of slots, every layer of the device: requantized from one region into the middle.
    virtual void move_rows(const KvCache& cache, int from, int to, std::span<const RowMove> slots) = 0;
    // K of one layer into blocks of the middle, 32 moves each. rows: f32 [·, K width] on the device, RowMove::from is one's index
    virtual void write_blocks(const KvCache& cache, int layer, const float* rows, std::span<const RowMove> moves) = 0;
};

}  // namespace lkv
