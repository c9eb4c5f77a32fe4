// Page-aligned memory whose pages are touched only when written: a half-full cache costs half its resident memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace lkv {

class Buffer {
public:
    Buffer() = default;
    explicit Buffer(size_t bytes);  // throws Error when the system refuses
    ~Buffer();
    Buffer(Buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace lkv
