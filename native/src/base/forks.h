// What a child of fork() inherits is memory, and of the threads only the one that forked.
#pragma once

#include <pthread.h>

#include <atomic>

namespace lkv {

// How many forks lie between the process that first asked and this one. What was made under another number has threads, or a device's
// context, that are not here.
inline int forks() {
    static std::atomic<int> n{0};
    [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { n++; });
    return n;
}

// From now on a fork waits until no other thread holds ggml's one lock, which nobody would release in the child. Safe to call again.
void guard_forks();

}  // namespace lkv
