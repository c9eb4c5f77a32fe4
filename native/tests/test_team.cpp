// A team's threads meet at barriers and in runs, whatever their number; how it makes room and takes it again.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <thread>
#include <vector>

#include "check.h"
#include "threads/team.h"

extern "C" void GOMP_parallel(void (*work)(void*), void* data, unsigned n, unsigned flags);  // threads/openmp.cpp

namespace lkv::test {
namespace {

struct Shared {
    std::vector<int> steps;
    std::atomic<int> threads{0};
    std::atomic<int> firsts{0};
    std::atomic<bool> apart{false};
};

void step_together(void* data) {
    auto& shared = *static_cast<Shared*>(data);
    Team& team = *Team::current();
    const auto me = static_cast<size_t>(Team::number());
    shared.threads++;
    if (team.first()) shared.firsts++;
    for (int step = 1; step <= 200; step++) {
        shared.steps[me] = step;
        team.barrier();
        for (size_t i = 0; i < static_cast<size_t>(team.size()); i++) {
            if (shared.steps[i] != step) shared.apart = true;
        }
        team.barrier();
    }
}

void threads_meet() {
    Team team;
    for (const int n : {1, 4, 2, 3, 4, 1, 4}) {
        Shared shared;
        shared.steps.assign(4, 0);
        team.run(step_together, &shared, n);
        CHECK(!shared.apart);
        CHECK(shared.threads == team.size());
        CHECK(team.size() >= 1 && team.size() <= n);
        CHECK(shared.firsts == 1);
    }
    CHECK(Team::current() == nullptr);
}

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// Who waits long, in a run or between two, leaves the core to others.
void waiting_threads_sleep() {
    Team team;
    const auto pause = [](void*) {
        if (Team::number() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
        Team::current()->barrier();
    };
    team.run(pause, nullptr, 4);
    const double begin = processor_seconds();
    team.run(pause, nullptr, 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK(processor_seconds() - begin < 0.2);  // of 2.1 if they spun
}

void patience_follows_what_it_brings() {
    Patience patience(100'000);
    CHECK(patience.next() == 100'000);
    patience.spun(true);
    CHECK(patience.next() == 100'000);
    for (int i = 0; i < 4; i++) patience.spun(false);
    int looks = 0;
    for (int i = 0; i < 160; i++) {
        if (patience.next() > 0) {
            looks++;
            patience.spun(false);
        }
    }
    CHECK(looks == 10);
    patience.spun(true);
    CHECK(patience.next() > 0);
    for (int i = 0; i < 10; i++) patience.spun(true);
    CHECK(patience.next() == 100'000);
}

// A machine with room for `room` threads: how many of so many windows had more threads than fit.
constexpr int64_t window = 20'000'000;
constexpr int64_t failing = 40'000'000;

int windows_too_large(Crowding& crowding, int asked, int room, int windows) {
    int too_large = 0;
    for (int i = 0; i < windows; i++) {
        const int n = std::min(asked, crowding.most());
        if (n > room) too_large++;
        std::vector<double> queued(static_cast<size_t>(n), 0.001);
        for (int j = room - 1; j < n && n > room; j++) queued[static_cast<size_t>(std::max(0, j))] = 0.5;
        crowding.window(asked, queued, n > room ? failing : window);
    }
    return too_large;
}

void a_team_makes_room() {
    Crowding crowding;
    windows_too_large(crowding, 16, 16, 50);
    CHECK(crowding.most() >= 16);
    windows_too_large(crowding, 16, 14, 20);
    const int tries = windows_too_large(crowding, 16, 14, 1000);
    CHECK(tries >= 20 && tries <= 30);
    windows_too_large(crowding, 16, 16, 200);
    CHECK(crowding.most() >= 16);
    windows_too_large(crowding, 16, 0, 100);
    CHECK(crowding.most() <= 2);
    crowding.window(1, std::array{0.9}, window);
    CHECK(crowding.most() >= 1);
    // what runs now and then beside does not cost a thread
    Crowding calm;
    for (int i = 0; i < 100; i++) calm.window(2, std::array{0.0, 0.2}, window);
    CHECK(calm.most() >= 2);
    for (int i = 0; i < 100; i++) calm.window(64, std::vector<double>(64, 0.001), window);
    CHECK(calm.most() >= 64);
}

// A thread that is ready and has no core is seen.
void the_queue_is_measured() {
    const QueueTime queue(static_cast<int>(gettid()));
    const int64_t before = queue.ns();
    std::atomic<bool> stop{false};
    std::vector<std::thread> others;
    for (unsigned i = 0; i < 2 * std::thread::hardware_concurrency(); i++) {
        others.emplace_back([&stop] {
            while (!stop) {
            }
        });
    }
    const double begin = processor_seconds();
    while (processor_seconds() - begin < 0.5) {
    }
    stop = true;
    for (std::thread& other : others) other.join();
    CHECK(queue.ns() > before);
    CHECK(QueueTime(0x7fffffff).ns() == 0);
}

void count(void* data) { ++*static_cast<std::atomic<int>*>(data); }

// Threads that a parallel region had.
int threads_of_a_region(unsigned n) {
    std::atomic<int> ran{0};
    GOMP_parallel(count, &ran, n, 0);
    return ran;
}

#ifdef __SANITIZE_THREAD__
constexpr bool threads_after_fork = false;  // ThreadSanitizer ends a child that starts some
#else
constexpr bool threads_after_fork = true;
#endif

// How the child of a fork ended, which did `work`: 0 where it returned true. It may take ten seconds.
template <class Work>
int in_a_child(const Work& work) {
    const pid_t child = fork();
    if (child == 0) {
        alarm(10);
        std::exit(work() ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

// A child of fork() has none of its parent's threads: it starts others, ends without the lost ones, and leaves the parent's alone.
void a_forked_child_has_threads_of_its_own() {
    const auto all = [](unsigned n) {
        for (int i = 0; i < 50; i++) {
            const int ran = threads_of_a_region(n);
            if (ran < 1 || ran > static_cast<int>(n)) return false;
        }
        return true;
    };
    CHECK(all(3));
    CHECK(in_a_child([&] { return all(3); }) == 0);
    CHECK(in_a_child([] { return true; }) == 0);
    CHECK(in_a_child([&] { return all(2) && in_a_child([&] { return all(4); }) == 0; }) == 0);
    int from_a_thread = -1;
    std::thread([&] {
        all(2);
        from_a_thread = in_a_child([&] { return all(3); });
    }).join();
    CHECK(from_a_thread == 0);
    CHECK(all(4));
}

}  // namespace
}  // namespace lkv::test

int main() {
    using namespace lkv::test;
    threads_meet();
    waiting_threads_sleep();
    patience_follows_what_it_brings();
    a_team_makes_room();
    the_queue_is_measured();
    if (threads_after_fork) a_forked_child_has_threads_of_its_own();
    return report("test_team");
}
