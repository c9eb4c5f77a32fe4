// Kernels that start early on the emulated GPU find what was there before those that they overtake, until they wait.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "check.h"
#include "ops/cuda/gpu/chain.cuh"

namespace {

using lkv::cuda::launch_clusters;
using lkv::cuda::launch_next;

constexpr int n_threads = 64;
constexpr unsigned n_blocks = 4;
constexpr int n_seen = n_threads * n_blocks;

struct Seen {
    int before, after;
};

struct Memory {
    int* x = nullptr;
    Seen* seen = nullptr;

    explicit Memory(int first) {
        cudaMalloc(&x, sizeof *x);
        cudaMalloc(&seen, n_seen * sizeof *seen);
        cudaMemcpy(x, &first, sizeof first, cudaMemcpyHostToDevice);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() {
        cudaFree(x);
        cudaFree(seen);
    }
    bool all_saw(int before, int after) const {
        std::vector<Seen> got(n_seen);
        cudaMemcpy(got.data(), seen, n_seen * sizeof *seen, cudaMemcpyDeviceToHost);
        return std::all_of(got.begin(), got.end(), [&](Seen s) { return s.before == before && s.after == after; });
    }
};

void add_kernel(int* x) {
    cudaGridDependencySynchronize();
    if (threadIdx.x == 0) ++*x;
}

// Half of the threads wait for earlier kernels, and the others for them.
void look_kernel(const int* x, Seen* seen) {
    const int before = *x;
    if (threadIdx.x < n_threads / 2) cudaGridDependencySynchronize();
    __syncthreads();
    seen[blockIdx.x * n_threads + threadIdx.x] = {before, *x};
}

void write_early_kernel(int* x) {
    if (threadIdx.x == 0) *x = 1;
    cudaGridDependencySynchronize();
}

void never_wait_kernel(const int*) {}

void add(const Memory& m, unsigned blocks) {
    CHECK(launch_next(add_kernel, dim3(blocks), n_threads, 0, nullptr, m.x) == cudaSuccess);
}
void look(const Memory& m, unsigned cluster = 1) {
    const int* const x = m.x;
    CHECK(launch_clusters(dim3(cluster), look_kernel, dim3(n_blocks), n_threads, 0, nullptr, x, m.seen) == cudaSuccess);
}

void early_kernels_find_old_bytes() {
    const Memory m(1);
    add(m, 1);
    add(m, 3);  // each finds what the others wrote
    for (const unsigned cluster : {1, 2, 4}) {
        look(m, cluster);
        CHECK(m.all_saw(cluster == 1 ? 1 : 5, 5));  // copied meanwhile
    }
    add(m, 1);
    look(m, 2);
    look(m, 4);  // the same chain
    CHECK(m.all_saw(5, 6));
}

void others_wait_for_all() {
    const Memory m(1);
    add(m, 1);
    cudaDeviceSynchronize();
    look(m);
    CHECK(m.all_saw(2, 2));
    add(m, 1);
    emulated_launch("look_kernel", look_kernel, dim3(n_blocks), n_threads, 0, nullptr, m.x, m.seen);
    CHECK(m.all_saw(3, 3));
}

template <class Run>
bool aborts(Run&& run) {
    const pid_t child = fork();
    if (child == 0) {
        std::fclose(stderr);
        run();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

void faults_stop_the_program() {
    const Memory m(1);
    CHECK(!aborts([&] { add(m, 1); }));
    CHECK(aborts([&] { launch_next(write_early_kernel, dim3(1), n_threads, 0, nullptr, m.x); }));
    CHECK(aborts([&] {
        add(m, 1);
        launch_next(write_early_kernel, dim3(1), n_threads, 0, nullptr, m.x);
    }));
    const int* const x = m.x;
    CHECK(aborts([&] { launch_next(never_wait_kernel, dim3(1), n_threads, 0, nullptr, x); }));
}

}  // namespace

int main() {
    early_kernels_find_old_bytes();
    others_wait_for_all();
    faults_stop_the_program();
    return lkv::test::report("early");
}
