// OpenMP as far as ggml-cpu uses it, by the names that GCC calls: its threads are a Team's. libgomp's spin at every barrier for as long as
// a core may stay lost; told not to (GOMP_SPINCOUNT), they sleep at every barrier of an idle machine, and only if told before it is loaded.
#include <algorithm>
#include <memory>
#include <thread>

#include "threads/team.h"

#define LKV_HIDDEN __attribute__((visibility("hidden")))  // what else in the process was built with OpenMP has its own

extern "C" {

LKV_HIDDEN void GOMP_parallel(void (*work)(void*), void* data, unsigned n, unsigned flags);
LKV_HIDDEN void GOMP_barrier();
LKV_HIDDEN bool GOMP_single_start();
LKV_HIDDEN int omp_get_num_threads();
LKV_HIDDEN int omp_get_thread_num();

void GOMP_parallel(void (*work)(void*), void* data, unsigned n, unsigned /*flags*/) {
    static thread_local const auto team = std::make_unique<lkv::Team>();
    if (n == 0) n = std::max(1U, std::thread::hardware_concurrency());
    team->run(work, data, static_cast<int>(n));
}

void GOMP_barrier() { lkv::Team::current()->barrier(); }

bool GOMP_single_start() { return lkv::Team::current()->first(); }

int omp_get_num_threads() {
    const lkv::Team* const team = lkv::Team::current();
    return team == nullptr ? 1 : team->size();
}

int omp_get_thread_num() { return lkv::Team::number(); }
}
