// Whether other programs want the cores that a team of threads runs on. Linux.
#pragma once

#include <cstdint>
#include <span>

namespace lkv {

// Time that a thread of this process was ready to run and stood in the queue for a core.
class QueueTime {
public:
    explicit QueueTime(int thread_id);
    ~QueueTime();
    QueueTime(QueueTime&& other) noexcept;
    QueueTime& operator=(QueueTime&&) = delete;

    // Nanoseconds since the thread began; 0 where the system does not tell.
    int64_t ns() const;

private:
    int file_;
};

// How many threads a team should have of those that are asked for.
//
// It divides the time that each thread stood in the queue by the time that the team worked. A team stands still while any of its
// threads does. So one thread fewer, which costs 1 / n, is better where all of them together stand for more than that, and one of them for
// a good part of it: what a system does now and then on every core is no reason. Whether there is room again, only a try can tell: a window
// with one thread more, as seldom as failing is dear: one token may take a second where its barriers wait for time slices.
class Crowding {
public:
    // After a window of so long work by as many threads as `queued` has parts, where `asked` were asked for.
    void window(int asked, std::span<const double> queued, int64_t worked_ns);
    // The most threads to use.
    int most() const { return most_; }

private:
    int most_ = 1 << 20;
    int64_t since_try_ns_ = 0;
    int64_t pause_ns_ = 0;  // until the next
    bool trying_ = false;
};

}  // namespace lkv
