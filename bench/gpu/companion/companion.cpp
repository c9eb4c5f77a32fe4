#include "companion.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "real.h"

namespace consumer {

namespace {

constexpr int64_t burst_ns = 2'000'000;           // a device-wide synchronization of the program waits for two of them
constexpr int64_t trial_ns = 40'000'000;          // longer than the copies of a trial take
constexpr size_t buffer_bytes = size_t{1} << 31;  // far beyond L2
constexpr size_t copied_bytes = size_t{1} << 28;
constexpr size_t n_seen = 1024;
constexpr double pressure = 0.7;  // readers who can leave so much of what is wanted keep their rate beside any program
constexpr int step = 4;

void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // not the program's
    throw std::runtime_error(std::string("expected ") + what + "; got " + cudaGetErrorString(error));
}

[[noreturn]] void leave(const std::exception& problem) {
    std::fprintf(stderr, "[consumer] %s\n", problem.what());
    std::_Exit(2);
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
                           static_cast<int>(number_of("CONSUMER_THREADS"))};
    return card;
}

void Companion::read(const Choice& choice, int64_t ns) {
    check(read_memory({buffer_, buffer_bytes, choice.blocks, choice.way, choice.rate, ns, ++n_readings_ * 7919, read_},
                      readers_),
          "readers");
}

unsigned long long Companion::bytes_read() {
    unsigned long long n = 0;
    check(cudaMemcpyAsync(&n, read_, sizeof n, cudaMemcpyDeviceToHost, own_), "a count");
    check(cudaStreamSynchronize(own_), "a count");
    return n;
}

// Bytes read and written in a second, the median of five copies. light: blocks, see copy_memory.
double Companion::copy(int light) {
    cudaEvent_t marks[7];
    for (cudaEvent_t& mark : marks) check(cudaEventCreate(&mark), "an event");
    check(cudaEventRecord(marks[0], own_), "an event");
    for (int i = 1; i < 7; i++) {
        check(copy_memory(copied_, copied_ + copied_bytes, copied_bytes, light, own_), "a copy");
        check(cudaEventRecord(marks[i], own_), "an event");
    }
    check(cudaEventSynchronize(marks[6]), "copies");
    std::vector<double> rates;
    for (int i = 1; i < 6; i++) {
        float ms = 0.0f;
        check(cudaEventElapsedTime(&ms, marks[i], marks[i + 1]), "a time");
        rates.push_back(2.0 * copied_bytes / (ms * 1e-3));
    }
    for (cudaEvent_t mark : marks) cudaEventDestroy(mark);
    std::sort(rates.begin(), rates.end());
    return rates[2];
}

double Companion::beside(const Choice& choice) {
    read(choice, trial_ns);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the readers are there first
    const double copied = copy(0);
    check(cudaStreamSynchronize(readers_), "readers that end");
    return copied;
}

// The fewest readers who can leave clearly less than the card's bandwidth, then the rate at which they leave just that.
void Companion::choose() {
    const double wanted = card().bytes_per_second;
    const int least = std::max(step, real_ - card().multiprocessors);
    double fewest = alone_;
    Choice best;
    for (int blocks = least; blocks <= real_ * 2 / 3 && chosen_.blocks == 0; blocks += step) {
        for (const Way way : ways) {
            const double copied = beside({way, blocks, 0.0});
            if (copied < fewest) {
                fewest = copied;
                best = {way, blocks, 0.0};
            }
            if (copied <= pressure * wanted) {
                chosen_ = {way, blocks, 0.0};
                break;
            }
        }
    }
    if (chosen_.blocks == 0) chosen_ = best;
    if (fewest > wanted) {
        std::fprintf(stderr, "[consumer] expected readers that leave %.2f TB/s; got %.2f beside %d\n", wanted / 1e12,
                     fewest / 1e12, best.blocks);
        if (number_of("CONSUMER_ANY") == 0) std::_Exit(2);
        return;
    }
    // what they ask for is less than memory moves for them, or more
    double low = 0.0;
    double high = 4.0 * alone_;
    for (int i = 0; i < 10; i++) {
        chosen_.rate = (low + high) / 2.0;
        (beside(chosen_) > wanted ? low : high) = chosen_.rate;
    }
    chosen_.rate = high;
}

// What an earlier run chose, on the same GPU: way, readers, rate.
bool Companion::given() {
    const char* const text = std::getenv("CONSUMER_CHOICE");
    char name[16] = "";
    double rate = 0.0;
    int blocks = 0;
    if (text == nullptr || std::sscanf(text, "%15[a-z],%d,%lf", name, &blocks, &rate) != 3) return false;
    for (const Way way : ways) {
        if (std::strcmp(name, name_of(way)) == 0) chosen_ = {way, blocks, rate};
    }
    return chosen_.blocks > 0 && chosen_.blocks < real_;
}

// For whoever looks into it: what readers of every number and kind leave.
void Companion::survey() {
    for (const Way way : ways) {
        for (const int blocks : {4, 8, 12, 16, 24, 32, 48, 64}) {
            const double copied = beside({way, blocks, 0.0});
            std::fprintf(stderr, "[consumer] survey: %d readers (%s): a copy moves %.2f TB/s\n", blocks, name_of(way),
                         copied / 1e12);
        }
    }
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

// Copies beside the readers that run, for many bursts.
Companion::Found Companion::now() {
    std::vector<double> copied;
    const unsigned long long read = bytes_read();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 9; i++) copied.push_back(copy(0));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const double reading = static_cast<double>(bytes_read() - read) / seconds;
    std::sort(copied.begin(), copied.end());
    return {copied[4], copy(multiprocessors()), reading};
}

void Companion::start() try {
    check(cudaGetDevice(&device_), "a device");
    check(real_runtime().cudaDeviceGetAttribute(&real_, cudaDevAttrMultiProcessorCount, device_),
          "a count of multiprocessors");
    check(cudaMalloc(reinterpret_cast<void**>(&buffer_), buffer_bytes), "2 GiB of GPU memory to read");
    check(cudaMalloc(reinterpret_cast<void**>(&copied_), 2 * copied_bytes), "0.5 GiB of GPU memory to copy");
    check(cudaMalloc(reinterpret_cast<void**>(&read_), sizeof *read_), "GPU memory");
    check(cudaMalloc(reinterpret_cast<void**>(&seen_), n_seen * sizeof *seen_), "GPU memory");
    check(cudaMemset(read_, 0, sizeof *read_), "memory that can be written");
    check(cudaMemset(buffer_, 1, buffer_bytes), "memory that can be written");
    check(cudaMemset(copied_, 1, 2 * copied_bytes), "memory that can be written");
    check(prepare(), "227 KB of shared memory a block");
    check(cudaDeviceSynchronize(), "memory that can be written");
    int least = 0;
    int most = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &most), "priorities");
    check(real_runtime().cudaStreamCreateWithPriority(&readers_, cudaStreamNonBlocking, most), "a stream");
    check(real_runtime().cudaStreamCreateWithPriority(&own_, cudaStreamNonBlocking, least), "a stream");
    copy(0);
    alone_ = copy(0);
    if (number_of("CONSUMER_SURVEY") > 0) survey();
    if (!given()) choose();
    runner_ = std::thread([this] { run(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    before_ = now();
    std::fprintf(
        stderr,
        "[consumer] before: %d of %d multiprocessors left (small blocks reached %d); a copy moves %.2f TB/s, a "
        "light one %.2f, of %.2f wanted, alone %.2f; readers (%s) ask for %.2f of %.2f\n",
        multiprocessors(), real_, reached(), before_.copied / 1e12, before_.light / 1e12,
        card().bytes_per_second / 1e12, alone_ / 1e12, name_of(chosen_.way), before_.reading / 1e12,
        chosen_.rate / 1e12);
} catch (const std::exception& problem) {
    leave(problem);
}

void Companion::end() try {
    const Found after = now();
    ending_ = true;
    runner_.join();
    std::fprintf(stderr, "[consumer] after: a copy moves %.2f TB/s, a light one %.2f; readers ask for %.2f\n",
                 after.copied / 1e12, after.light / 1e12, after.reading / 1e12);
    const char* path = std::getenv("CONSUMER_REPORT");
    if (path == nullptr) return;
    if (std::FILE* file = std::fopen(path, "w")) {
        std::fprintf(file,
                     "{\"multiprocessors\": %d, \"of\": %d, \"choice\": \"%s,%d,%.0f\", \"copy_alone_gb_per_s\": %.0f, "
                     "\"copy_before_gb_per_s\": %.0f, \"copy_after_gb_per_s\": %.0f, \"light_copy_gb_per_s\": %.0f}\n",
                     multiprocessors(), real_, name_of(chosen_.way), chosen_.blocks, chosen_.rate, alone_ / 1e9,
                     before_.copied / 1e9, after.copied / 1e9, after.light / 1e9);
        std::fclose(file);
    }
} catch (const std::exception& problem) {
    leave(problem);
}

// Two bursts are queued at a time, each of which lets the next start shortly before it ends.
void Companion::run() try {
    check(cudaSetDevice(device_), "the device");
    cudaEvent_t ends[2];
    for (cudaEvent_t& end : ends)
        check(cudaEventCreateWithFlags(&end, cudaEventDisableTiming | cudaEventBlockingSync), "an event");
    for (uint64_t n = 0; !ending_; n++) {
        if (n >= 2) check(cudaEventSynchronize(ends[n % 2]), "a burst of reading");
        read(chosen_, burst_ns);
        check(cudaEventRecord(ends[n % 2], readers_), "an event");
    }
    check(cudaStreamSynchronize(readers_), "a burst of reading");
} catch (const std::exception& problem) {
    leave(problem);
}

}  // namespace consumer
