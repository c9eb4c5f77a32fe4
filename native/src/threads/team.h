// Threads that compute one graph after another together. Linux.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "threads/crowding.h"

namespace lkv {

// How long a thread spins on a counter before it sleeps: as long as spinning has paid off. The thread that it waits for may have lost its
// core, perhaps to the one that spins: with 50 us of spinning before every sleep SmolLM2 decoded a fifth of what it does with none.
class Patience {
public:
    explicit Patience(int64_t most_ns) : most_(most_ns), now_(most_ns) {}

    // For the next wait, in nanoseconds.
    int64_t next();
    // paid: the counter was raised meanwhile.
    void spun(bool paid);

private:
    int64_t most_;
    int64_t now_;
    int slept_ = 0;
};

// A counter that one thread raises and others wait for.
class Signal {
public:
    int value() const { return value_.load(std::memory_order_acquire); }
    void raise();
    // Returns when the value is no longer `old`.
    void wait(int old, Patience& spins);

private:
    alignas(64) std::atomic<int> value_{0};
    std::atomic<int> sleepers_{0};
};

// The thread that owns a team is one of its threads, number 0. Others sleep between calls, and make room where the machine is busy.
class Team {
public:
    Team();
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // Runs work(data) on up to n threads and returns when all have. How many there are is size(), inside.
    void run(void (*work)(void*), void* data, int n);

    // In a child of fork(), before the team is leaked: closes the files through which its threads were watched.
    void leave() { queues_.clear(); }

    // The team of the calling thread, inside of run, and its number there. Outside: null and 0.
    static Team* current();
    static int number();
    int size() const { return size_; }
    // Returns when every thread of the team has called it.
    void barrier();
    // True for the first thread that asks in a run.
    bool first();

private:
    struct Worker;
    void hire(int n);
    void serve(Worker& worker);
    void note(int asked, int64_t worked_ns);

    std::vector<std::unique_ptr<Worker>> workers_;  // number 1 and up
    std::vector<QueueTime> queues_;                 // of every thread
    Crowding crowding_;
    int64_t worked_ns_ = 0;           // in this window
    std::vector<int64_t> queued_ns_;  // of this window's threads, when it began
    std::vector<double> queued_;
    Patience patience_;
    Signal passed_;
    alignas(64) std::atomic<int> arrived_{0};
    std::atomic<bool> taken_{false};
    alignas(64) int size_ = 1;
    void (*work_)(void*) = nullptr;
    void* data_ = nullptr;
};

}  // namespace lkv
