// The functions of libgomp that ggml-cpu calls, on the threads of a Team. Those of libgomp spin at every barrier, for as long as a core may
// be lost to another program. GOMP_SPINCOUNT would stop that, if it is set before libgomp is loaded, but then they sleep at every barrier
// of an idle machine too.
#include <algorithm>
#include <memory>
#include <thread>

#include "base/forks.h"
#include "threads/team.h"

#define LKV_HIDDEN __attribute__((visibility("hidden")))  // other libraries of the process have their own OpenMP

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
