// The bytes of a file, read-only: memory-mapped, or read into memory aligned for tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace lkv {

class MappedFile {
public:
    MappedFile() = default;

    // Errors: a path that cannot be opened or read, or is not a regular file.
    explicit MappedFile(const std::string& path, bool use_mmap = true);

    MappedFile(MappedFile&&) noexcept = default;
    MappedFile& operator=(MappedFile&&) noexcept = default;

    const uint8_t* data() const { return data_.get(); }  // 64-byte aligned; null for an empty file
    size_t size() const { return size_; }
    std::span<const uint8_t> bytes() const { return {data_.get(), size_}; }
    bool mapped() const { return data_.get_deleter().mapped_size > 0; }

private:
    struct Release {
        size_t mapped_size;  // 0: the bytes are on the heap
        void operator()(const uint8_t* data) const;
    };

    std::unique_ptr<const uint8_t, Release> data_{nullptr, Release{0}};
    size_t size_ = 0;
};

}  // namespace lkv
