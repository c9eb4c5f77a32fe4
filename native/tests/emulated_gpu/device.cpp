#undef _FORTIFY_SOURCE  // fibers jump from stack to stack
#include "device.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

namespace {

constexpr size_t stack_bytes = 128 * 1024;
constexpr auto patience = std::chrono::minutes(5);
constexpr uint32_t own_variables = 1 << 24;  // addresses of those around `anchor`
constexpr int rank_bit = 26;

struct Barrier {
    int arrived = 0;
    unsigned turns = 0;
    int any = 0;
    int result = 0;
};

struct Warp {
    uint64_t words[2][32];
    int arrived = 0;
    unsigned turns = 0;
};

struct Fiber {
    ucontext_t context;  // of its beginning
    jmp_buf place;
    std::unique_ptr<char[]> stack;
    bool begun = false;
    bool done = false;
    unsigned cluster_turn = 0;
};

struct Block;
struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    std::atomic<int> ready{0};
    int threads = 0;
    int arrived = 0;
    std::atomic<unsigned> turns{0};
};

struct Block {
    Cluster* cluster;
    int rank;
    const std::function<void()>* kernel;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier barrier;
    Barrier named[16];
    std::unique_ptr<uint8_t[]> memory;
    uint8_t* shared;
    char* variables;  // this thread's `anchor`
    int now = 0;      // the fiber that runs
    unsigned progress = 0;
    jmp_buf scheduler;
};

// Whole pages.
struct Mapping {
    void* begin;
    size_t bytes;
    explicit Mapping(size_t n)
        : begin(mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)), bytes(n) {
        if (begin == MAP_FAILED) fail("memory for the emulated GPU");
    }
    char* end() const { return static_cast<char*>(begin) + bytes; }
};
std::multimap<void*, Mapping> allocated;  // by what allocate() returned

// Of thread blocks that have ended: the system clears what it gives anew, which took as long as the kernels.
std::vector<std::unique_ptr<char[]>> stacks;

alignas(64) thread_local char anchor[64];
thread_local Block* block;
std::mutex mutex;
std::atomic<long long> ticks{0};

std::unique_ptr<char[]> take_stack() {
    const std::lock_guard held(mutex);
    if (stacks.empty()) return std::make_unique_for_overwrite<char[]>(stack_bytes);
    std::unique_ptr<char[]> stack = std::move(stacks.back());
    stacks.pop_back();
    return stack;
}

void begin_fiber() {
    (*block->kernel)();
    block->fibers[static_cast<size_t>(block->now)].done = true;
    block->progress++;
    _longjmp(block->scheduler, 1);
}

void resume(Block& b, int i) {
    Fiber& fiber = b.fibers[static_cast<size_t>(i)];
    b.now = i;
    threadIdx = dim3(static_cast<unsigned>(i), 0, 0);
    if (_setjmp(b.scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

void run(Block& b, dim3 index, dim3 threads, dim3 grid) {
    block = &b;
    b.variables = anchor;
    blockIdx = index;
    blockDim = threads;
    gridDim = grid;
    for (Fiber& fiber : b.fibers) {
        fiber.stack = take_stack();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = stack_bytes;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, begin_fiber, 0);
    }
    // where all of a cluster lie is known before any begins
    b.cluster->ready++;
    while (b.cluster->ready.load() < static_cast<int>(b.cluster->blocks.size())) std::this_thread::yield();
    const auto start = std::chrono::steady_clock::now();
    // a warp that nobody waits for as it should is late sooner or later
    std::mt19937 random(index.x + 1000 * index.y);
    std::vector<size_t> order(b.warps.size());
    std::iota(order.begin(), order.end(), size_t{0});
    size_t late = 0;  // the last ones of an order, which wait
    unsigned rounds = 0;
    for (unsigned waits = 1; waits != 0; rounds--) {
        if (rounds == 0) {
            rounds = 16u << random() % 8;
            std::shuffle(order.begin(), order.end(), random);
            late = late == 0 ? order.size() / 4 : 0;
        }
        waits = 0;
        const unsigned before = b.progress;
        for (size_t k = 0; k < order.size(); k++) {
            const size_t end = std::min(b.fibers.size(), 32 * order[k] + 32);
            for (size_t i = 32 * order[k]; i < end; i++) {
                if (b.fibers[i].done) continue;
                waits++;
                if (k + late < order.size()) resume(b, static_cast<int>(i));
            }
        }
        if (b.progress == before) late = 0;  // the others wait for them
        ticks++;
        if (std::chrono::steady_clock::now() - start > patience) fail("every thread block to end within five minutes");
        if (b.cluster->blocks.size() > 1) std::this_thread::yield();
    }
    const std::lock_guard held(mutex);
    for (Fiber& fiber : b.fibers) stacks.push_back(std::move(fiber.stack));
}

// Of the waiting ones the last to arrive opens it.
void meet(Barrier& at, int threads, bool waits, int x = 0) {
    at.any |= x;
    const unsigned turn = at.turns;
    if (++at.arrived == threads) {
        at.arrived = 0;
        at.result = at.any;
        at.any = 0;
        at.turns++;
        block->progress++;
        return;
    }
    while (waits && at.turns == turn) yield();
}

}  // namespace

void fail(const char* expected) {
    std::fprintf(stderr, "[emulated gpu] expected %s; got thread %u of block %u, %u, %u\n", expected, threadIdx.x,
                 blockIdx.x, blockIdx.y, blockIdx.z);
    std::abort();
}

void* allocate(size_t bytes) {
    constexpr size_t align = 16;
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t used = (bytes + align - 1) / align * align;
    const Mapping mapping((used + page - 1) / page * page + page);
    char* const end = mapping.end() - page;
    if (mprotect(end, page, PROT_NONE) != 0) fail("memory that nothing may touch");
    std::memset(end - used, 0xff, used);
    const std::lock_guard held(mutex);
    allocated.emplace(end - used, mapping);
    return end - used;
}

void free(void* at) {
    const std::lock_guard held(mutex);
    const auto found = allocated.find(at);
    if (found == allocated.end()) return;
    munmap(found->second.begin, found->second.bytes);
    allocated.erase(found);
}

void yield() {
    Block& b = *block;
    if (_setjmp(b.fibers[static_cast<size_t>(b.now)].place) == 0) _longjmp(b.scheduler, 1);
}

void lock() { mutex.lock(); }
void unlock() { mutex.unlock(); }
long long clock() { return 100 * ticks.load(); }

int block_barrier(int x) {
    meet(block->barrier, static_cast<int>(blockDim.x), true, x != 0);
    return block->barrier.result;
}
void named_barrier_sync(int id, int threads) { meet(block->named[id], threads, true); }
void named_barrier_arrive(int id, int threads) { meet(block->named[id], threads, false); }

void cluster_barrier_arrive() {
    Cluster& c = *block->cluster;
    const std::lock_guard held(mutex);
    block->fibers[threadIdx.x].cluster_turn = c.turns.load();
    if (++c.arrived < c.threads) return;
    c.arrived = 0;
    c.turns++;
}
void cluster_barrier_wait() {
    while (block->cluster->turns.load() == block->fibers[threadIdx.x].cluster_turn) yield();
}

const uint64_t* exchange(uint64_t x) {
    Warp& warp = block->warps[threadIdx.x / 32];
    const unsigned turn = warp.turns;
    uint64_t* const words = warp.words[turn % 2];
    words[threadIdx.x % 32] = x;
    const unsigned lanes = std::min(32u, blockDim.x - threadIdx.x / 32 * 32);
    if (++warp.arrived == static_cast<int>(lanes)) {
        warp.arrived = 0;
        warp.turns++;
        block->progress++;
    }
    while (warp.turns == turn) yield();
    return words;
}

void* dynamic_shared() { return block->shared; }

uint32_t address_of(const void* at) {
    const auto* const byte = static_cast<const uint8_t*>(at);
    const auto place = reinterpret_cast<uintptr_t>(byte) - reinterpret_cast<uintptr_t>(block->shared);
    if (place < most_shared) return static_cast<uint32_t>(place);
    const auto from_anchor = reinterpret_cast<intptr_t>(byte) - reinterpret_cast<intptr_t>(block->variables);
    return static_cast<uint32_t>(from_anchor + own_variables);
}

uint32_t address_in(uint32_t address, int rank) { return address | static_cast<uint32_t>(rank + 1) << rank_bit; }

void* at_address(uint32_t address) {
    const uint32_t rank = address >> rank_bit;
    const Block& of = rank == 0 ? *block : *block->cluster->blocks[rank - 1];
    const uint32_t place = address & ((1u << rank_bit) - 1);
    if (place < most_shared) return of.shared + place;
    return of.variables + (static_cast<intptr_t>(place) - own_variables);
}

int rank() { return block->rank; }
int n_ranks() { return static_cast<int>(block->cluster->blocks.size()); }

bool launch(dim3 grid, dim3 threads, dim3 cluster, size_t shared_bytes, const std::function<void()>& kernel) {
    if (shared_bytes > most_shared || grid.x % cluster.x != 0 || grid.y % cluster.y != 0 || cluster.z != 1)
        return false;
    for (unsigned z = 0; z < grid.z; z++) {
        for (unsigned y = 0; y < grid.y; y += cluster.y) {
            for (unsigned x = 0; x < grid.x; x += cluster.x) {
                Cluster c;
                c.threads = static_cast<int>(cluster.x * cluster.y * threads.x);
                std::vector<dim3> at;
                for (unsigned j = 0; j < cluster.y; j++) {
                    for (unsigned i = 0; i < cluster.x; i++) {
                        auto b = std::make_unique<Block>();
                        b->cluster = &c;
                        b->rank = static_cast<int>(c.blocks.size());
                        b->kernel = &kernel;
                        b->fibers.resize(threads.x);
                        b->warps.resize((threads.x + 31) / 32);
                        constexpr size_t align = 1024;
                        b->memory = std::make_unique_for_overwrite<uint8_t[]>(most_shared + align);
                        b->shared = b->memory.get() + align - reinterpret_cast<uintptr_t>(b->memory.get()) % align;
                        std::memset(b->shared, 0xff, most_shared);  // NaN, whatever it is read as
                        c.blocks.push_back(std::move(b));
                        at.emplace_back(x + i, y + j, z);
                    }
                }
                std::vector<std::thread> workers;
                for (size_t k = 0; k < c.blocks.size(); k++) {
                    workers.emplace_back([&, k] { run(*c.blocks[k], at[k], threads, grid); });
                }
                for (std::thread& worker : workers) worker.join();
            }
        }
    }
    return true;
}

}  // namespace emulated
