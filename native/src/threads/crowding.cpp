#include "threads/crowding.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>
#include <utility>

namespace lkv {

QueueTime::QueueTime(int thread_id)
    : file_(open(("/proc/self/task/" + std::to_string(thread_id) + "/schedstat").c_str(), O_RDONLY | O_CLOEXEC)) {}

QueueTime::QueueTime(QueueTime&& other) noexcept : file_(std::exchange(other.file_, -1)) {}

QueueTime::~QueueTime() {
    if (file_ >= 0) close(file_);
}

int64_t QueueTime::ns() const {
    char text[96];  // "RUN QUEUED SLICES"
    const ssize_t n = file_ < 0 ? -1 : pread(file_, text, sizeof text - 1, 0);
    if (n <= 0) return 0;
    text[n] = '\0';
    long long queued = 0;
    return std::sscanf(text, "%*u %lld", &queued) == 1 ? queued : 0;
}

void Crowding::window(int asked, std::span<const double> queued, int64_t worked_ns) {
    constexpr int64_t longest_pause = 5'000'000'000;
    const int n = static_cast<int>(queued.size());
    const double sum = std::accumulate(queued.begin(), queued.end(), 0.0);
    const double most = *std::max_element(queued.begin(), queued.end());
    const bool crowded = n > 1 && sum * n > 1 && 2 * most * n > 1;
    const bool tried = std::exchange(trying_, false);
    since_try_ns_ += worked_ns;
    if (crowded) {
        most_ = std::max(1, n - std::max(1, static_cast<int>(sum)));
        pause_ns_ = std::min(20 * worked_ns, longest_pause);
        since_try_ns_ = 0;
    } else if (tried) {
        pause_ns_ = 0;
    }
    if (!crowded && asked > n && since_try_ns_ >= pause_ns_) {
        most_ = n + 1;
        trying_ = true;
        since_try_ns_ = 0;
    }
}

}  // namespace lkv
