// A GPU on the CPU, as far as the kernels need one: every thread is a fiber, every thread block a thread of the operating system, whose
// thread_local variables are its shared memory. Thread blocks run cluster after cluster, those of a cluster at the same time, their warps in
// an order that is drawn anew again and again. It checks what kernels compute, that nobody waits for ever and that what starts early reads
// nothing that is not there yet (chain.h); memory has no caches, and copies and products are done at once.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// what kernels call so
extern thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

// A Hopper with all of its instructions; or, where EMULATED_GPU is 8.9 or 8.6, a consumer card: 99 KB of shared memory a thread block, no
// copy engine, no clusters, no products by warpgroups, no programmatic launch.
int capability();  // 90, 89, 86
inline bool hopper() { return capability() == 90; }
void needs_hopper(const char* what);  // stops the program elsewhere
int n_multiprocessors();
constexpr uint32_t most_shared = 232448;  // bytes of a thread block, on any of them
uint32_t shared_bytes();

// Two devices. This thread's current one is 0 until it sets another.
constexpr int n_devices = 2;
constexpr int host = -1;
int device();
bool set_device(int device);

// Memory that ends where none is, but for what 16 bytes need: who reads or writes past it stops the program, as a GPU would. Filled with
// NaN, whatever it is read as. of: a device, or the host. Null where emulated_fail_allocation() wants it.
void* allocate(size_t bytes, int of);
void free(void* at);
int device_of(const void* at);  // host: it is nobody's else
// Only this device's memory may be touched from now on: who touches another's stops the program.
void close_others(int device);
// A copy may touch all, and waits for all.
extern std::atomic<size_t> copied_bytes;  // between host and device, or on it
void open_all();

// Runs all thread blocks of the grid; false: the grid is not one. early: it starts while those before it still run
bool launch(dim3 grid, dim3 block, dim3 cluster, size_t shared_bytes, bool early, const std::function<void()>& kernel);
// What errors call the kernel that runs.
void in_kernel(const char* name);
// For the kernels before this one.
void wait_for_grids();

// Lets the other threads go on.
void yield();
// Some that wait may go on.
void advance();
// Between thread blocks of a cluster.
void lock();
void unlock();
// Goes on while threads wait.
long long clock();

// A barrier of the thread block; whether any thread passed something else than 0.
int block_barrier(int x = 0);
void named_barrier_sync(int id, int threads);
void named_barrier_arrive(int id, int threads);
void cluster_barrier_arrive();
void cluster_barrier_wait();

inline int lane() { return static_cast<int>(threadIdx.x % 32); }
// What all lanes of the warp passed, until the exchange after the next one.
const uint64_t* exchange(uint64_t x);

// What a lane holds of a product of 16 x 16 and 16 x 8, in the order of its registers.
struct Fragment {
    float a[8], b[4], c[4];
};
// c += a b for a warp; `of` are its lanes' Fragments as exchange() has them. Sums are rounded once.
void multiply(const uint64_t* of);

template <class T>
uint64_t word_of(T x) {
    static_assert(sizeof x <= sizeof(uint64_t));
    uint64_t word = 0;
    std::memcpy(&word, &x, sizeof x);
    return word;
}
template <class T>
T from_word(uint64_t word) {
    T x;
    std::memcpy(&x, &word, sizeof x);
    return x;
}

// The value of every f16 word: GCC makes doubles of them by a function call each, which was a third of the tests' time.
extern const std::array<float, 1 << 16> half_values;

// Shared memory by 32-bit addresses: from 0 on what a launch asked for, as products by warpgroups want it, then the kernel's own variables.
void* dynamic_shared();
uint32_t address_of(const void* at);
// The same place of another block of the cluster.
uint32_t address_in(uint32_t address, int rank);
void* at_address(uint32_t address);

int n_ranks();

// Says which thread of which kernel runs.
void tell(const char* what);
// Stops the program: a kernel did what a GPU would fail at.
[[noreturn]] void fail(const char* expected);

// What failed last on this thread, a cudaError_t.
int& last_error();

}  // namespace emulated

// The nth allocation from now on fails, and all after it; 0: none does.
extern "C" void emulated_fail_allocation(int nth);
extern "C" size_t emulated_copied_bytes();  // between host and device, and on a device
