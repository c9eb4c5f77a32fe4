#include "device.h"

#include <sys/mman.h>
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
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chain.h"
#include "place.h"

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

const std::array<float, 1 << 16> half_values = [] {
    std::array<float, 1 << 16> values;
    for (uint32_t bits = 0; bits < values.size(); bits++) {
        values[bits] = static_cast<float>(from_word<_Float16>(bits));
    }
    return values;
}();

namespace {

// No multiple of a page: what threads have on top of theirs would lie in the same few lines of the processor's cache.
constexpr size_t stack_bytes = 128 * 1024 + 320;
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

// Goes from thread to thread of the emulated GPU: to begin one anew takes system calls.
struct Stack {
    alignas(16) char bytes[stack_bytes];
    Place place;  // beside what it has first
    bool begun = false;
};

struct Fiber {
    Stack* stack = nullptr;
    bool done = false;
    const unsigned* waits_for = nullptr;  // the turns of a barrier, until they are no longer `turns`
    unsigned turns = 0;
    unsigned cluster_turn = 0;
};

struct Block;
struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    std::atomic<int> ready{0};
    int threads = 0;
    int arrived = 0;
    std::atomic<unsigned> turns{0};
    // Until no thread can go on but by waiting for earlier kernels, memory is as these found it.
    std::atomic<bool> early{false};
    std::atomic<unsigned> advances{0};
    std::vector<unsigned> stuck_at;  // `advances`, by rank, when none of the block's threads could go on
};
constexpr unsigned not_stuck = ~0u;
constexpr unsigned ended = ~0u - 1;

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
    Place scheduler;
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
struct Allocation {
    Mapping mapping;  // its last page is nobody's
    int device;
};
constexpr int none_left = -1;
std::atomic<int> allocations_left = 0;             // 0: as many as are wanted
std::multimap<const void*, Allocation> allocated;  // by what allocate() returned
thread_local int current = 0;
bool is_closed[n_devices] = {};

void set_access(const Mapping& mapping, bool closed) {
    if (mprotect(mapping.begin, mapping.bytes - page_bytes(), closed ? PROT_NONE : PROT_READ | PROT_WRITE) != 0) {
        fail("memory whose protection may change");
    }
}

void set_closed(int device, bool closed) {
    if (is_closed[device] == closed) return;
    is_closed[device] = closed;
    for (const auto& [at, allocation] : allocated) {
        if (allocation.device == device) set_access(allocation.mapping, closed);
    }
}

// Stacks of thread blocks that have ended are kept: the system clears what it gives anew, which took as long as the kernels.
std::vector<Stack*> stacks;
std::vector<std::unique_ptr<uint8_t[]>> memories;  // all ones

alignas(64) thread_local char anchor[64];
thread_local Block* block;
std::mutex mutex;
std::atomic<long long> ticks{0};
std::atomic<const char*> kernel_name{nullptr};
std::atomic<bool> waited{false};  // the kernel that runs, for those before it

Stack* take_stack() {
    const std::lock_guard held(mutex);
    if (stacks.empty()) {
        static std::vector<std::unique_ptr<Stack[]>> all;
        constexpr size_t n = 64;
        all.push_back(std::make_unique_for_overwrite<Stack[]>(n));
        for (size_t i = 0; i < n; i++) stacks.push_back(&all.back()[i]);
    }
    Stack* const stack = stacks.back();
    stacks.pop_back();
    return stack;
}

constexpr size_t shared_align = 1024;

std::unique_ptr<uint8_t[]> take_memory() {
    if (memories.empty()) {
        auto memory = std::make_unique_for_overwrite<uint8_t[]>(most_shared + shared_align);
        std::memset(memory.get(), 0xff, most_shared + shared_align);  // NaN, whatever it is read as
        return memory;
    }
    std::unique_ptr<uint8_t[]> memory = std::move(memories.back());
    memories.pop_back();
    return memory;
}

void wait(const unsigned& turns, unsigned while_equal) {
    Fiber& fiber = block->fibers[static_cast<size_t>(block->now)];
    fiber.waits_for = &turns;
    fiber.turns = while_equal;
    while (turns == while_equal) yield();
    fiber.waits_for = nullptr;
}

// A function, for the thread of the operating system that is asked may be another each time.
[[gnu::noinline]] Block& now() { return *block; }

void run_threads() {
    while (true) {
        (*now().kernel)();
        now().fibers[static_cast<size_t>(now().now)].done = true;
        advance();
        yield();
    }
}

void resume(Block& b, int i) {
    Stack& stack = *b.fibers[static_cast<size_t>(i)].stack;
    b.now = i;
    threadIdx = dim3(static_cast<unsigned>(i), 0, 0);
    if (std::exchange(stack.begun, true)) {
        change(b.scheduler, stack.place);
    } else {
        begin(b.scheduler, stack.bytes, stack_bytes, run_threads);
    }
}

// No thread of the block could go on while `advances` did not change: where that holds for all blocks of the cluster, those before have ended.
void stop_being_early(Block& b, unsigned advances) {
    Cluster& c = *b.cluster;
    const std::lock_guard held(mutex);
    c.stuck_at[static_cast<size_t>(b.rank)] = advances;
    const auto is_stuck = [&](unsigned at) { return at == advances || at == ended; };
    if (!c.early || c.advances != advances || !std::all_of(c.stuck_at.begin(), c.stuck_at.end(), is_stuck)) return;
    show_present();
    c.early = false;
}

void run(Block& b, dim3 index, dim3 threads, dim3 grid) {
    block = &b;
    b.variables = anchor;
    blockIdx = index;
    blockDim = threads;
    gridDim = grid;
    for (Fiber& fiber : b.fibers) fiber.stack = take_stack();
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
        const unsigned advances = b.cluster->advances;
        const bool all = late == 0;
        for (size_t k = 0; k < order.size(); k++) {
            const size_t end = std::min(b.fibers.size(), 32 * order[k] + 32);
            for (size_t i = 32 * order[k]; i < end; i++) {
                const Fiber& fiber = b.fibers[i];
                if (fiber.done) continue;
                waits++;
                if (fiber.waits_for != nullptr && *fiber.waits_for == fiber.turns) continue;
                if (k + late < order.size()) resume(b, static_cast<int>(i));
            }
        }
        if (all && b.cluster->early && b.cluster->advances == advances) stop_being_early(b, advances);
        if (b.progress == before) late = 0;  // the others wait for them
        ticks++;
        if (std::chrono::steady_clock::now() - start > patience) fail("every thread block to end within five minutes");
        if (b.cluster->blocks.size() > 1) std::this_thread::yield();
    }
    const std::lock_guard held(mutex);
    b.cluster->stuck_at[static_cast<size_t>(b.rank)] = ended;
    for (const Fiber& fiber : b.fibers) stacks.push_back(fiber.stack);
}

// The last of the waiting threads to arrive opens the barrier.
void meet(Barrier& at, int threads, bool waits, int x = 0) {
    at.any |= x;
    const unsigned turn = at.turns;
    if (++at.arrived == threads) {
        at.arrived = 0;
        at.result = at.any;
        at.any = 0;
        at.turns++;
        advance();
        return;
    }
    if (waits) wait(at.turns, turn);
}

// Whether a cluster of n starts early: the first does, and about three others.
bool chosen(size_t index, size_t n) {
    static std::mt19937 random;
    return index == 0 || random() % n < 3;
}

}  // namespace

void tell(const char* what) {
    const char* const name = kernel_name;
    std::fprintf(stderr, "[emulated gpu] %s: thread %u of block %u, %u, %u of %s\n", what, threadIdx.x, blockIdx.x,
                 blockIdx.y, blockIdx.z, name != nullptr ? name : "no kernel");
}

void fail(const char* expected) {
    tell((std::string("expected ") + expected + "; got").c_str());
    std::abort();
}

int capability() {
    static const int found = [] {
        const char* const asked = std::getenv("EMULATED_GPU");
        const std::string name = asked == nullptr ? "9.0" : asked;
        if (name == "9.0") return 90;
        if (name == "8.9") return 89;
        if (name == "8.6") return 86;
        fail("EMULATED_GPU to be 9.0, 8.9 or 8.6");
    }();
    return found;
}
void needs_hopper(const char* what) {
    if (!hopper()) fail(what);
}
int n_multiprocessors() { return capability() == 90 ? 132 : capability() == 89 ? 128 : 82; }
uint32_t shared_bytes() { return hopper() ? most_shared : 99 << 10; }

int& last_error() {
    thread_local int error = 0;
    return error;
}

int device() { return current; }

bool set_device(int device) {
    if (device < 0 || device >= n_devices) return false;
    current = device;
    return true;
}

void* allocate(size_t bytes, int of) {
    if (allocations_left > 0 && --allocations_left == 0) allocations_left = none_left;
    if (allocations_left == none_left) return nullptr;
    constexpr size_t align = 16;
    const size_t page = page_bytes();
    const size_t used = (bytes + align - 1) / align * align;
    const Mapping mapping((used + page - 1) / page * page + page);
    char* const end = mapping.end() - page;
    if (mprotect(end, page, PROT_NONE) != 0) fail("memory that nothing may touch");
    std::memset(end - used, 0xff, used);
    const std::lock_guard held(mutex);
    allocated.emplace(end - used, Allocation{mapping, of});
    if (of == host) return end - used;
    add_pages(static_cast<char*>(mapping.begin), mapping.bytes - page, of);
    if (is_closed[of]) set_access(mapping, true);
    return end - used;
}

void free(void* at) {
    const std::lock_guard held(mutex);
    const auto found = allocated.find(at);
    if (found == allocated.end()) return;
    if (found->second.device != host) remove_pages(static_cast<char*>(found->second.mapping.begin));
    munmap(found->second.mapping.begin, found->second.mapping.bytes);
    allocated.erase(found);
}

int device_of(const void* at) {
    const std::lock_guard held(mutex);
    auto found = allocated.upper_bound(at);
    if (found == allocated.begin()) return host;
    const Allocation& allocation = (--found)->second;
    return at < allocation.mapping.end() ? allocation.device : host;
}

void close_others(int device) {
    const std::lock_guard held(mutex);
    end_chain_of_others(device);
    for (int other = 0; other < n_devices; other++) set_closed(other, other != device);
}

void open_all() {
    const std::lock_guard held(mutex);
    end_chain();
    for (int device = 0; device < n_devices; device++) set_closed(device, false);
}

void yield() {
    Block& b = *block;
    change(b.fibers[static_cast<size_t>(b.now)].stack->place, b.scheduler);
}

void advance() {
    block->progress++;
    if (block->cluster->early) block->cluster->advances++;
}

void in_kernel(const char* name) { kernel_name = name; }

void wait_for_grids() {
    if (!waited) waited = true;
    while (now().cluster->early) yield();
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
    advance();
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
        advance();
    }
    if (warp.turns == turn) wait(warp.turns, turn);
    return words;
}

void multiply(const uint64_t* of) {
    double a[16][16], b[16][8], c[16][8];
    // register r of lane l, half e: row l / 4 + 8 (r % 2), column 2 (l % 4) + e + 8 (r / 2) of a; b likewise, across
    for (int lane = 0; lane < 32; lane++) {
        const auto* const x = from_word<const Fragment*>(of[lane]);
        for (int i = 0; i < 8; i++) a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i % 2 + i / 4 * 8] = x->a[i];
        for (int i = 0; i < 4; i++) b[lane % 4 * 2 + i % 2 + i / 2 * 8][lane / 4] = x->b[i];
        for (int i = 0; i < 4; i++) c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = x->c[i];
    }
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < 16; k++) {
            for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        auto* const x = from_word<Fragment*>(of[lane]);
        for (int i = 0; i < 4; i++) x->c[i] = static_cast<float>(c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
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

int n_ranks() { return static_cast<int>(block->cluster->blocks.size()); }

bool launch(dim3 grid, dim3 threads, dim3 cluster, size_t shared_bytes, bool early,
            const std::function<void()>& kernel) {
    const bool clusters = cluster.x * cluster.y * cluster.z > 1;
    if (shared_bytes > emulated::shared_bytes() || (clusters && !hopper()) || grid.x % cluster.x != 0 ||
        grid.y % cluster.y != 0 || cluster.z != 1) {
        return false;
    }
    close_others(current);
    if (early) {
        continue_chain(current);
    } else {
        end_chain();
    }
    waited = false;
    const size_t n_clusters = size_t{grid.x / cluster.x} * (grid.y / cluster.y) * grid.z;
    size_t index = 0;
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
                        b->memory = take_memory();
                        b->shared = b->memory.get() + shared_align -
                                    reinterpret_cast<uintptr_t>(b->memory.get()) % shared_align;
                        c.blocks.push_back(std::move(b));
                        at.emplace_back(x + i, y + j, z);
                    }
                }
                c.early = early && chosen(index++, n_clusters);
                c.stuck_at.assign(c.blocks.size(), not_stuck);
                if (c.early) show_old();
                std::vector<std::thread> workers;
                if (c.blocks.size() == 1) run(*c.blocks[0], at[0], threads, grid);
                for (size_t k = 0; k < c.blocks.size() && c.blocks.size() > 1; k++) {
                    workers.emplace_back([&, k] { run(*c.blocks[k], at[k], threads, grid); });
                }
                for (std::thread& worker : workers) worker.join();
                if (c.early) show_present();
                for (const auto& b : c.blocks) {
                    uint8_t* const end = b->shared + shared_bytes;
                    const auto unwritten = [](uint8_t byte) { return byte == 0xff; };
                    if (!std::all_of(end, std::min(end + 4096, b->shared + most_shared), unwritten)) {
                        fail("no write behind the shared memory that the launch asked for");
                    }
                    std::memset(b->shared, 0xff, shared_bytes);
                    memories.push_back(std::move(b->memory));
                }
            }
        }
    }
    if (early && !waited) fail("a thread block that waits for earlier kernels, so that later ones do");
    in_kernel(nullptr);
    return true;
}

std::atomic<size_t> copied_bytes = 0;

}  // namespace emulated

extern "C" void emulated_fail_allocation(int nth) { emulated::allocations_left = nth; }
extern "C" size_t emulated_copied_bytes() { return emulated::copied_bytes; }
