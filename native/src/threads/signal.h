// A counter that one thread raises and others wait for. Linux.
#pragma once

#include <atomic>
#include <cstdint>

namespace lkv {

// How long a thread looks at a counter before it sleeps: as long as looking has paid. A thread that is waited for may have lost its core,
// perhaps to the very thread that looks: with 50 us of looking before every sleep SmolLM2 decoded a fifth of what it does with none.
class Patience {
public:
    explicit Patience(int64_t most_ns) : most_(most_ns), now_(most_ns) {}

    // For the next wait, in nanoseconds.
    int64_t next();
    void looked(bool paid);

private:
    int64_t most_;
    int64_t now_;
    int slept_ = 0;
};

class Signal {
public:
    int value() const { return value_.load(std::memory_order_acquire); }
    void raise();
    // Returns when the value is no longer `old`.
    void wait(int old, Patience& patience);

private:
    alignas(64) std::atomic<int> value_{0};
    std::atomic<int> sleepers_{0};
};

}  // namespace lkv
