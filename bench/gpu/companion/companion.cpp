#include "companion.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "places.h"
#include "real.h"

namespace consumer {

namespace {

constexpr int64_t burst_ns = 2'000'000;           // a device-wide synchronization of the program waits for two of them
constexpr int64_t trial_ns = 60'000'000;          // longer than the copies of a trial take
constexpr size_t buffer_bytes = size_t{1} << 31;  // far beyond L2
constexpr size_t copied_bytes = size_t{1} << 28;
constexpr size_t n_seen = 1024;
constexpr int step = 4;
constexpr int least_left = 64;  // multiprocessors
constexpr int n_corrections = 20;
constexpr double near_enough = 0.03;
constexpr double room = 0.9;        // of what is wanted, that readers who ask for all leave: a rate can go up, too
constexpr int64_t patience_s = 20;  // in which a GPU that works ends a burst

void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // not the program's
    throw std::runtime_error(std::string("expected ") + what + "; got " + cudaGetErrorString(error));
}

[[noreturn]] void leave(const std::exception& problem) {
    std::fprintf(stderr, "[consumer] %s\n", problem.what());
    std::_Exit(2);
}

int64_t seconds_now() {
    return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

double number_of(const char* name) {
    const char* text = std::getenv(name);
    return text ? std::atof(text) : 0.0;
}

}  // namespace

const Card& card() {
    static const Card card{number_of("CONSUMER_GB_PER_S") * 1e9,
                           static_cast<int>(number_of("CONSUMER_SHARED_KB")) * 1024,
                           static_cast<int>(number_of("CONSUMER_CAPABILITY")) / 10,
                           static_cast<int>(number_of("CONSUMER_CAPABILITY")) % 10,
                           static_cast<int>(number_of("CONSUMER_MULTIPROCESSORS")),
                           static_cast<int>(number_of("CONSUMER_THREADS")),
                           number_of("CONSUMER_NO_READERS") == 0};
    return card;
}

void Companion::place(int n) {
    readers_ = stream_on(device_, n);
    n_readers_ = n;
}

void Companion::read(double rate) {
    check(read_memory({buffer_, buffer_bytes, n_readers_, rate, burst_ns, ++n_readings_ * 7919, read_}, readers_),
          "readers");
}

unsigned long long Companion::bytes_read() {
    unsigned long long n = 0;
    check(cudaMemcpyAsync(&n, read_, sizeof n, cudaMemcpyDeviceToHost, own_), "a count");
    check(cudaStreamSynchronize(own_), "a count");
    return n;
}

// Bytes that a copy, or a program that reads only, moves in a second, over n times. light: blocks, see copy_memory.
double Companion::moved(bool written, int light, int n) {
    std::vector<cudaEvent_t> marks(static_cast<size_t>(n) + 2);
    for (cudaEvent_t& mark : marks) check(cudaEventCreate(&mark), "an event");
    check(cudaEventRecord(marks[0], own_), "an event");
    for (size_t i = 1; i < marks.size(); i++) {
        check(copy_memory(copied_, written ? copied_ + copied_bytes : nullptr, copied_bytes, light, own_), "a copy");
        check(cudaEventRecord(marks[i], own_), "an event");
    }
    check(cudaEventSynchronize(marks.back()), "copies");
    float ms = 0.0f;
    check(cudaEventElapsedTime(&ms, marks[1], marks.back()), "a time");
    for (cudaEvent_t mark : marks) cudaEventDestroy(mark);
    seen_alive_ = seconds_now();
    return (written ? 2.0 : 1.0) * copied_bytes * n / (ms * 1e-3);
}

Companion::Found Companion::beside(double rate) {
    for (int64_t ns = 0; ns < trial_ns; ns += burst_ns) read(rate);  // as beside a program
    std::this_thread::sleep_for(std::chrono::milliseconds(2));       // the readers are there first
    const Found found{moved(true, 0, 5), moved(false, 0, 5), moved(false, real_ - n_readers_, 36)};
    check(cudaStreamSynchronize(readers_), "readers that end");
    return found;
}

// The fewest readers who can leave a light program clearly less than the card's bandwidth, and the rate at which they
// leave just that, which steer() corrects. A copy has several times as much in flight as a matrix product with one
// token, or attention to a cache.
void Companion::choose() {
    const double wanted = card().bytes_per_second;
    const bool surveyed = number_of("CONSUMER_SURVEY") > 0;
    for (int n = std::max(step, (real_ - card().multiprocessors) / step * step); n <= real_ - least_left; n += step) {
        place(n);
        const Found most = beside(0.0);
        Found found = most;
        double low = 0.0;
        double high = alone_.read;
        const bool enough = most.light <= room * wanted;
        for (int i = 0; i < 10 && enough; i++) {
            const double rate = (low + high) / 2.0;
            const Found tried = beside(rate);
            (tried.light > wanted ? low : high) = rate;
            if (tried.light <= wanted) found = tried;
        }
        if (surveyed)
            std::fprintf(
                stderr,
                "[consumer] survey: %d readers leave lightly %.2f, reading %.2f, copying %.2f at most; at %.2f "
                "TB/s %.2f, %.2f, %.2f\n",
                n, most.light / 1e12, most.read / 1e12, most.copied / 1e12, high / 1e12, found.light / 1e12,
                found.read / 1e12, found.copied / 1e12);
        if (!enough) continue;
        rate_ = high;
        if (!surveyed) return;
    }
    if (rate_ > 0.0) return;
    std::fprintf(stderr, "[consumer] expected readers that leave %.2f TB/s; got more beside %d\n", wanted / 1e12,
                 n_readers_);
    if (number_of("CONSUMER_ANY") == 0) std::_Exit(2);
}

// What an earlier run chose, on the same GPU: readers, and their rate; 0: steered from what memory has.
bool Companion::given() {
    const char* const text = std::getenv("CONSUMER_CHOICE");
    if (text == nullptr) return false;
    int n = 0;
    double rate = 0.0;
    if (std::sscanf(text, "%d,%lf", &n, &rate) != 2 || n <= 0 || n >= real_ || n % 2 != 0)
        throw std::runtime_error(std::string("expected an even number of readers and their rate; got ") + text);
    place(n);
    rate_ = rate > 0.0 ? rate : alone_.read;
    return true;
}

// Multiprocessors on which small blocks of the program run: the median of 20 launches.
int Companion::reached() {
    std::vector<size_t> found;
    for (int i = 0; i < 20; i++) {
        std::vector<unsigned> seen(n_seen);
        check(cudaMemsetAsync(seen_, 0, n_seen * sizeof *seen_, own_), "counts");
        check(visit_multiprocessors(seen_, 4 * real_, own_), "small blocks");
        check(cudaMemcpyAsync(seen.data(), seen_, n_seen * sizeof *seen_, cudaMemcpyDeviceToHost, own_), "counts");
        check(cudaStreamSynchronize(own_), "small blocks");
        found.push_back(n_seen - static_cast<size_t>(std::count(seen.begin(), seen.end(), 0u)));
    }
    std::sort(found.begin(), found.end());
    return static_cast<int>(found[10]);
}

// What is moved beside the readers that run, for many bursts.
Companion::Found Companion::now() {
    const unsigned long long read = bytes_read();
    const auto begin = std::chrono::steady_clock::now();
    Found found{moved(true, 0, 45), moved(false, 0, 45), moved(false, multiprocessors(), 45)};
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    found.reading = static_cast<double>(bytes_read() - read) / seconds;
    found.mhz = mhz();
    return found;
}

// Between two steps of the program, which waits meanwhile: what reads lightly gets now.
double Companion::light() try { return moved(false, multiprocessors(), 45); } catch (const std::exception& problem) {
    leave(problem);
}

// The same, after the readers' rate has followed it to the card's bandwidth.
double Companion::steer() try {
    const double wanted = card().bytes_per_second;
    double left = light();
    for (int i = 0; card().reads && i < n_corrections && std::abs(left - wanted) > near_enough * wanted; i++) {
        rate_ = std::clamp(rate_ + (left - wanted), 0.01 * wanted, alone_.read);
        std::this_thread::sleep_for(std::chrono::nanoseconds(3 * burst_ns));  // two bursts are queued at the old rate
        left = light();
    }
    return left;
} catch (const std::exception& problem) {
    leave(problem);
}

// The clock of the multiprocessors, now: at half of it a program sees half of everything.
double Companion::mhz() try {
    int64_t ticked[2] = {};
    check(count_cycles(ticked_, own_), "a clock");
    check(cudaMemcpyAsync(ticked, ticked_, sizeof ticked, cudaMemcpyDeviceToHost, own_), "a clock");
    check(cudaStreamSynchronize(own_), "a clock");
    return 1e3 * static_cast<double>(ticked[0]) / static_cast<double>(ticked[1]);
} catch (const std::exception& problem) {
    leave(problem);
}

void Companion::start() try {
    seen_alive_ = seconds_now();
    watcher_ = std::thread([this] { watch(); });
    check(cudaGetDevice(&device_), "a device");
    int major = 0;
    check(real_runtime().cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_), "a capability");
    if (major != 9) throw std::runtime_error("expected an H100 or H200; got capability " + std::to_string(major));
    check(real_runtime().cudaDeviceGetAttribute(&real_, cudaDevAttrMultiProcessorCount, device_),
          "a count of multiprocessors");
    check(cudaMalloc(reinterpret_cast<void**>(&buffer_), buffer_bytes), "2 GiB of GPU memory to read");
    check(cudaMalloc(reinterpret_cast<void**>(&copied_), 2 * copied_bytes), "0.5 GiB of GPU memory to copy");
    check(cudaMalloc(reinterpret_cast<void**>(&read_), sizeof *read_), "GPU memory");
    check(cudaMalloc(reinterpret_cast<void**>(&seen_), n_seen * sizeof *seen_), "GPU memory");
    check(cudaMalloc(reinterpret_cast<void**>(&ticked_), 2 * sizeof *ticked_), "GPU memory");
    check(cudaMemset(read_, 0, sizeof *read_), "memory that can be written");
    check(cudaMemset(buffer_, 1, buffer_bytes), "memory that can be written");
    check(cudaMemset(copied_, 1, 2 * copied_bytes), "memory that can be written");
    check(prepare(), "227 KB of shared memory a block");
    check(cudaDeviceSynchronize(), "memory that can be written");
    int least = 0;
    int most = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &most), "priorities");
    check(real_runtime().cudaStreamCreateWithPriority(&own_, cudaStreamNonBlocking, least), "a stream");
    moved(true, 0, 5);
    alone_ = {moved(true, 0, 5), moved(false, 0, 5), moved(false, real_, 5), 0.0, mhz()};
    if (card().reads && !given()) choose();
    if (card().reads) runner_ = std::thread([this] { run(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (card().reads) steer();
    before_ = now();
    std::fprintf(stderr,
                 "[consumer] before: %d of %d multiprocessors left (small blocks reached %d) beside %d,%.0f; reading "
                 "lightly gets %.2f TB/s of %.2f wanted, reading %.2f, a copy %.2f; alone %.2f, %.2f, %.2f; readers "
                 "%.2f, at %.0f MHz\n",
                 multiprocessors(), real_, reached(), n_readers_, rate_.load(), before_.light / 1e12,
                 card().bytes_per_second / 1e12, before_.read / 1e12, before_.copied / 1e12, alone_.light / 1e12,
                 alone_.read / 1e12, alone_.copied / 1e12, before_.reading / 1e12, before_.mhz);
    report(nullptr);
    measuring_ = false;
} catch (const std::exception& problem) {
    leave(problem);
}

void Companion::end() try {
    seen_alive_ = seconds_now();
    measuring_ = true;
    const Found after = now();
    ending_ = true;
    if (card().reads) runner_.join();
    std::fprintf(
        stderr,
        "[consumer] after: reading lightly gets %.2f TB/s, reading %.2f, a copy %.2f; readers %.2f, at %.0f MHz\n",
        after.light / 1e12, after.read / 1e12, after.copied / 1e12, after.reading / 1e12, after.mhz);
    report(&after);
    ended_ = true;
    watcher_.join();
} catch (const std::exception& problem) {
    leave(problem);
}

// before the program, and again behind it: one that is ended leaves what was found before
void Companion::report(const Found* after) {
    const char* path = std::getenv("CONSUMER_REPORT");
    std::FILE* file = path != nullptr ? std::fopen(path, "w") : nullptr;
    if (file == nullptr) return;
    const auto write = [&](const char* when, const Found& found) {
        std::fprintf(file,
                     ", \"%s\": {\"copy_gb_per_s\": %.0f, \"read_gb_per_s\": %.0f, \"light_read_gb_per_s\": %.0f, "
                     "\"readers_gb_per_s\": %.0f, \"sm_mhz\": %.0f}",
                     when, found.copied / 1e9, found.read / 1e9, found.light / 1e9, found.reading / 1e9, found.mhz);
    };
    std::fprintf(file, "{\"multiprocessors\": %d, \"of\": %d, \"choice\": \"%d,%.0f\"", multiprocessors(), real_,
                 n_readers_, rate_.load());
    write("alone", alone_);
    write("before", before_);
    if (after != nullptr) write("after", *after);
    std::fprintf(file, "}\n");
    std::fclose(file);
}

// A GPU that ends no burst any more keeps nobody waiting.
void Companion::watch() {
    while (!ended_) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        if (!(card().reads || measuring_) || seconds_now() - seen_alive_ <= patience_s) continue;
        std::fprintf(stderr, "[consumer] expected work of the companion's to end within %d s; got none\n",
                     static_cast<int>(patience_s));
        std::_Exit(3);
    }
}

// Two bursts are queued at a time.
void Companion::run() try {
    check(cudaSetDevice(device_), "the device");
    cudaEvent_t ends[2];
    for (cudaEvent_t& end : ends)
        check(cudaEventCreateWithFlags(&end, cudaEventDisableTiming | cudaEventBlockingSync), "an event");
    for (uint64_t n = 0; !ending_; n++) {
        if (n >= 2) check(cudaEventSynchronize(ends[n % 2]), "a burst of reading");
        seen_alive_ = seconds_now();
        read(rate_);
        check(cudaEventRecord(ends[n % 2], readers_), "an event");
    }
    check(cudaStreamSynchronize(readers_), "a burst of reading");
} catch (const std::exception& problem) {
    leave(problem);
}

}  // namespace consumer
