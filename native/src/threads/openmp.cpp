// OpenMP as far as ggml-cpu uses it, by the names that GCC calls: its threads are a Team's. libgomp's spin at every barrier for as long as
// a core may stay lost; told not to (GOMP_SPINCOUNT), they sleep at every barrier of an idle machine, and only if told before it is loaded.
#include <algorithm>
#include <memory>
#include <thread>

#include "base/forks.h"
#include "threads/team.h"

#define LKV_HIDDEN __attribute__((visibility("hidden")))  // what else in the process was built with OpenMP has its own

namespace {

// The team of one thread. In a child of fork() that thread goes on without the others: it leaves them behind and builds a new team.
class OwnTeam {
public:
    OwnTeam() = default;
    OwnTeam(const OwnTeam&) = delete;
    OwnTeam& operator=(const OwnTeam&) = delete;
    ~OwnTeam() { leave_inherited(); }

    lkv::Team& get() {
        leave_inherited();
        if (team_ == nullptr) {
            forks_ = lkv::forks();
            team_ = std::make_unique<lkv::Team>();
        }
        return *team_;
    }

private:
    void leave_inherited() {
        if (team_ != nullptr && forks_ != lkv::forks()) {
            team_->leave();
            static_cast<void>(team_.release());  // its threads can be neither joined nor destroyed
        }
    }

    std::unique_ptr<lkv::Team> team_;
    int forks_ = 0;
};

}  // namespace

extern "C" {

LKV_HIDDEN void GOMP_parallel(void (*work)(void*), void* data, unsigned n, unsigned flags);
LKV_HIDDEN void GOMP_barrier();
LKV_HIDDEN bool GOMP_single_start();
LKV_HIDDEN int omp_get_num_threads();
LKV_HIDDEN int omp_get_thread_num();

void GOMP_parallel(void (*work)(void*), void* data, unsigned n, unsigned /*flags*/) {
    static thread_local OwnTeam team;
    if (n == 0) n = std::max(1U, std::thread::hardware_concurrency());
    team.get().run(work, data, static_cast<int>(n));
}

void GOMP_barrier() { lkv::Team::current()->barrier(); }

bool GOMP_single_start() { return lkv::Team::current()->first(); }

int omp_get_num_threads() {
    const lkv::Team* const team = lkv::Team::current();
    return team == nullptr ? 1 : team->size();
}

int omp_get_thread_num() { return lkv::Team::number(); }
}
