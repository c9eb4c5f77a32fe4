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
// A team waits whenever one of its threads waits for a core. One thread fewer costs 1 / n of the speed. So it pays where the threads
// together wait for more than that share of the time, and one of them for at least half of it: what a system does now and then on every
// core is no reason. Only a try can tell whether there is room again: a window with one thread more. Tries are rare, because a failed one
// is slow: one token may take a second where barriers wait for time slices.
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
