#include "threads/team.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <utility>

namespace lkv {
namespace {

constexpr int64_t barrier_ns = 100'000;    // longer waits are of a core that was lost, or end with a prompt's product
constexpr int64_t between_ns = 2'000'000;  // a token is sampled in less
constexpr int64_t window_ns = 20'000'000;
// how long a thread spins on a counter
constexpr int64_t least_ns = 1'000;
constexpr int waits_between_tries = 16;
constexpr int64_t try_ns = 20'000;

thread_local Team* team = nullptr;
thread_local int number_in_team = 0;
thread_local Patience* patience = nullptr;

int thread_id() { return static_cast<int>(syscall(SYS_gettid)); }

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

void Patience::spun(bool paid) {
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

void Signal::wait(int old, Patience& spins) {
    if (value() != old) return;
    if (const int64_t ns = spins.next(); ns > 0) {
        const int64_t until = now_ns() + ns;
        do {
            for (int i = 0; i < 8; i++) {
                relax();
                if (value() != old) return spins.spun(true);
            }
        } while (now_ns() < until);
        spins.spun(false);
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == old) {
        syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

struct Team::Worker {
    int number = 0;
    Signal go;
    Signal ready;
    std::atomic<bool> stop{false};
    int id = 0;
    std::thread thread;
};

Team::Team() : patience_(barrier_ns) { queues_.emplace_back(thread_id()); }

Team::~Team() {
    for (const auto& worker : workers_) {
        worker->stop = true;
        worker->go.raise();
    }
    for (const auto& worker : workers_) worker->thread.join();
}

Team* Team::current() { return team; }
int Team::number() { return number_in_team; }

void Team::serve(Worker& worker) {
    Patience between(between_ns);
    Patience inside(barrier_ns);
    team = this;
    number_in_team = worker.number;
    patience = &inside;
    worker.id = thread_id();
    worker.ready.raise();
    for (int seen = 0;; seen++) {
        worker.go.wait(seen, between);
        if (worker.stop) return;
        work_(data_);
        barrier();
    }
}

void Team::hire(int n) {
    while (static_cast<int>(workers_.size()) < n - 1) {
        auto worker = std::make_unique<Worker>();
        worker->number = static_cast<int>(workers_.size()) + 1;
        worker->thread = std::thread([this, &w = *worker] { serve(w); });
        Patience waits(0);
        worker->ready.wait(0, waits);
        queues_.emplace_back(worker->id);
        workers_.push_back(std::move(worker));
    }
}

void Team::run(void (*work)(void*), void* data, int n) {
    const int size = std::max(1, std::min(n, crowding_.most()));
    hire(size);
    const int64_t begin = now_ns();
    size_ = size;
    work_ = work;
    data_ = data;
    taken_.store(false, std::memory_order_relaxed);
    Team* const outer = std::exchange(team, this);
    const int outer_number = std::exchange(number_in_team, 0);
    Patience* const outer_patience = std::exchange(patience, &patience_);
    for (int i = 0; i < size - 1; i++) workers_[static_cast<size_t>(i)]->go.raise();
    work(data);
    barrier();
    team = outer;
    number_in_team = outer_number;
    patience = outer_patience;
    note(n, now_ns() - begin);
}

void Team::barrier() {
    const int seen = passed_.value();
    const int size = size_;  // once the last has arrived, the next run may have another
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
        arrived_.store(0, std::memory_order_relaxed);
        passed_.raise();
    } else {
        passed_.wait(seen, *patience);
    }
}

bool Team::first() { return !taken_.exchange(true, std::memory_order_relaxed); }

void Team::note(int asked, int64_t worked_ns) {
    const bool same = static_cast<int>(queued_ns_.size()) == size_;
    worked_ns_ += worked_ns;
    if (same && worked_ns_ < window_ns) return;
    if (same) {
        queued_.clear();
        for (size_t i = 0; i < queued_ns_.size(); i++) {
            queued_.push_back(static_cast<double>(queues_[i].ns() - queued_ns_[i]) / static_cast<double>(worked_ns_));
        }
        crowding_.window(asked, queued_, worked_ns_);
    }
    worked_ns_ = 0;
    const int next = std::max(1, std::min(asked, crowding_.most()));
    hire(next);
    queued_ns_.clear();
    for (int i = 0; i < next; i++) queued_ns_.push_back(queues_[static_cast<size_t>(i)].ns());
}

}  // namespace lkv
