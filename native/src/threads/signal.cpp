#include "threads/signal.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>

namespace lkv {
namespace {

constexpr int64_t least_ns = 1'000;
constexpr int waits_between_tries = 16;
constexpr int64_t try_ns = 20'000;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

}  // namespace

int64_t Patience::next() {
    if (now_ == 0 && ++slept_ >= waits_between_tries) {
        slept_ = 0;
        return std::min(try_ns, most_);
    }
    return now_;
}

void Patience::looked(bool paid) {
    if (paid) {
        now_ = std::min(most_, std::max(try_ns, 2 * now_));
    } else {
        now_ = now_ / 4 < least_ns ? 0 : now_ / 4;
    }
}

void Signal::raise() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
        syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
}

void Signal::wait(int old, Patience& patience) {
    if (value() != old) return;
    if (const int64_t ns = patience.next(); ns > 0) {
        const int64_t until = now_ns() + ns;
        do {
            for (int i = 0; i < 8; i++) {
                relax();
                if (value() != old) return patience.looked(true);
            }
        } while (now_ns() < until);
        patience.looked(false);
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == old) {
        syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace lkv
