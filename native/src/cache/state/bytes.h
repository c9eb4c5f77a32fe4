// A state's bytes as they are written and read.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace lkv {

class ByteWriter {
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

class ByteReader {
public:
    explicit ByteReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}
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

void put_name(ByteWriter& out, const std::string& name);
std::string get_name(ByteReader& in);

}  // namespace lkv
