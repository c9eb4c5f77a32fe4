// Memory that the system may not swap out, for as long as this lives.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace lkv {

class LockedMemory {
public:
    LockedMemory() = default;
    // Locks one range after the other, until the system refuses: error() says why then.
    explicit LockedMemory(const std::vector<std::span<const uint8_t>>& ranges) {
        for (const std::span<const uint8_t> range : ranges) {
            if (range.empty()) continue;
            if (::mlock(range.data(), range.size()) != 0) {
                error_ = std::strerror(errno);
                return;
            }
            ranges_.push_back(range);
        }
    }
    ~LockedMemory() {
        for (const std::span<const uint8_t> range : ranges_) ::munlock(range.data(), range.size());
    }
    LockedMemory(LockedMemory&& other) noexcept { *this = std::move(other); }
    LockedMemory& operator=(LockedMemory&& other) noexcept {
        std::swap(ranges_, other.ranges_);
        std::swap(error_, other.error_);
        return *this;
    }
    LockedMemory(const LockedMemory&) = delete;
    LockedMemory& operator=(const LockedMemory&) = delete;

    size_t bytes() const {
        size_t bytes = 0;
        for (const std::span<const uint8_t> range : ranges_) bytes += range.size();
        return bytes;
    }
    const std::string& error() const { return error_; }

    // What `ulimit -l` allows, in words.
    static std::string limit() {
        struct rlimit limit{};
        if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "any number of bytes";
        return std::to_string(limit.rlim_cur >> 10) + " KiB";
    }

private:
    std::vector<std::span<const uint8_t>> ranges_;  // that are locked
    std::string error_;
};

}  // namespace lkv
