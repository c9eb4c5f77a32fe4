#include "companion.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "real.h"

namespace consumer {

namespace {

constexpr int64_t burst_ns = 2'000'000;           // a device-wide synchronization of the program waits for two of them
constexpr int64_t trial_ns = 40'000'000;          // longer than the copies of a trial take
constexpr size_t buffer_bytes = size_t{1} << 30;  // far beyond L2
constexpr size_t copied_bytes = size_t{1} << 28;
constexpr size_t n_seen = 1024;

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

template <class F>
F driver(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion(name, &found, 12050, cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
        cudaGetLastError();
        return nullptr;
    }
    return reinterpret_cast<F>(found);
}

#define DRIVER(name) driver<decltype(&name)>(#name)

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

Division::Division(int real, int n, bool green) : reading_(n) {
    int least = 0;
    int most = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &most), "priorities");
    if (!green) {
        check(real_runtime().cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, most), "a stream");
        return;
    }
    const auto ask = DRIVER(cuDeviceGetDevResource);
    const auto split = DRIVER(cuDevSmResourceSplitByCount);
    const auto describe = DRIVER(cuDevResourceGenerateDesc);
    const auto create = DRIVER(cuGreenCtxCreate);
    const auto create_stream = DRIVER(cuGreenCtxStreamCreate);
    if (!ask || !split || !describe || !create || !create_stream) {
        problem_ = "the driver has no green contexts";
        return;
    }
    int device = 0;
    check(cudaGetDevice(&device), "a device");
    CUdevResource all{};
    CUdevResource parts[2]{};
    unsigned groups = 1;
    const auto step = [&](CUresult result, const char* what) {
        if (problem_.empty() && result != CUDA_SUCCESS) problem_ = std::string(what) + ": " + std::to_string(result);
    };
    step(ask(device, &all, CU_DEV_RESOURCE_TYPE_SM), "multiprocessors");
    if (valid()) step(split(&parts[0], &groups, &all, &parts[1], 0, static_cast<unsigned>(n)), "a split");
    for (int i = 0; i < 2 && valid(); i++) {
        CUdevResourceDesc description{};
        step(describe(&description, &parts[i], 1), "a description");
        if (valid()) step(create(&contexts_[i], description, device, CU_GREEN_CTX_DEFAULT_STREAM), "a green context");
    }
    if (!valid()) return;
    reading_ = real - static_cast<int>(parts[1].sm.smCount);
    CUstream stream = nullptr;
    step(create_stream(&stream, contexts_[0], CU_STREAM_NON_BLOCKING, most), "a stream");
    stream_ = stream;
}

Division::~Division() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    const auto destroy = DRIVER(cuGreenCtxDestroy);
    for (CUgreenCtx context : contexts_) {
        if (context != nullptr && destroy) destroy(context);
    }
}

cudaError_t Division::program_stream(cudaStream_t* stream, int priority) const {
    if (contexts_[1] == nullptr) {
        return real_runtime().cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, 0);  // behind the companion's
    }
    CUstream created = nullptr;
    if (DRIVER(cuGreenCtxStreamCreate)(&created, contexts_[1], CU_STREAM_NON_BLOCKING, priority) != CUDA_SUCCESS)
        return cudaErrorInvalidValue;
    *stream = created;
    return cudaSuccess;
}

Reading Companion::reading(int blocks, Way way, double rate, int64_t ns) {
    return {buffer_, buffer_bytes, blocks, way, rate, ns, ++n_readings_ * 7919, read_};
}

// Bytes read and written in a second, the median of five copies.
double Companion::copy(cudaStream_t stream) {
    cudaEvent_t marks[7];
    for (cudaEvent_t& mark : marks) check(cudaEventCreate(&mark), "an event");
    check(cudaEventRecord(marks[0], stream), "an event");
    for (int i = 1; i < 7; i++) {
        check(copy_memory(copied_, copied_ + copied_bytes, copied_bytes, stream), "a copy");
        check(cudaEventRecord(marks[i], stream), "an event");
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

unsigned long long Companion::bytes_read() {
    unsigned long long n = 0;
    check(cudaMemcpyAsync(&n, read_, sizeof n, cudaMemcpyDeviceToHost, own_), "a count");
    check(cudaStreamSynchronize(own_), "a count");
    return n;
}

// A copy beside readers that move `rate` bytes a second (0: as many as they can).
Companion::Found Companion::beside(const Division& division, Way way, double rate) {
    cudaStream_t program = nullptr;
    check(division.program_stream(&program, 0), "the program's stream");
    const unsigned long long read = bytes_read();
    const auto begin = std::chrono::steady_clock::now();
    check(read_memory(reading(division.reading(), way, rate, trial_ns), division.reading_stream()), "readers");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the readers are there first
    const double copied = copy(program);
    check(cudaStreamSynchronize(division.reading_stream()), "readers that end");
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    check(cudaStreamDestroy(program), "a stream");
    return {copied, static_cast<double>(bytes_read() - read) / std::min(seconds, 1.02e-9 * trial_ns)};
}

// The fewest readers beside which a copy gets clearly less than the card's bandwidth, then the rate at which it gets that.
bool Companion::choose(bool green) try {
    const double wanted = card().bytes_per_second;
    const int step = 8;
    const int least = (std::max(1, real_ - card().multiprocessors) + step - 1) / step * step;
    for (int n = least; n <= real_ * 2 / 3; n += step) {
        for (const Way way : {Way::prefetch, Way::load}) {
            auto* division = new Division(real_, n, green);
            if (!division->valid()) {
                std::fprintf(stderr, "[consumer] no green contexts (%s)\n", division->problem().c_str());
                delete division;
                return false;
            }
            if (beside(*division, way, 0.0).copied > 0.85 * wanted) {
                delete division;
                continue;
            }
            double low = 0.0;
            double high = 2.0 * alone_;
            for (int i = 0; i < 9; i++) {
                const double middle = (low + high) / 2.0;
                (beside(*division, way, middle).copied > wanted ? low : high) = middle;
            }
            division_ = division;
            green_ = green;
            way_ = way;
            rate_ = high;
            return true;
        }
    }
    std::fprintf(stderr, "[consumer] %s: a copy kept more than %.2f TB/s beside %d readers\n",
                 green ? "green contexts" : "full multiprocessors", wanted / 1e12, real_ * 2 / 3);
    return false;
} catch (const std::exception& problem) {
    std::fprintf(stderr, "[consumer] %s: %s\n", green ? "green contexts" : "full multiprocessors", problem.what());
    return false;
}

// For whoever looks into it: what readers of every number and kind leave.
void Companion::survey() try {
    for (const bool green : {true, false}) {
        for (const Way way : {Way::prefetch, Way::load}) {
            for (int n = 8; n <= 64; n += 8) {
                const Division division(real_, n, green);
                if (!division.valid()) {
                    std::fprintf(stderr, "[consumer] survey: %s\n", division.problem().c_str());
                    continue;
                }
                const Found most = beside(division, way, 0.0);
                const Found half = beside(division, way, alone_ / 2);
                std::fprintf(stderr,
                             "[consumer] survey: %s, %s, %d readers (asked %d): copy %.2f TB/s beside %.2f read; "
                             "at half rate %.2f beside %.2f\n",
                             green ? "green" : "full", way == Way::prefetch ? "prefetch" : "load", division.reading(),
                             n, most.copied / 1e12, most.reading / 1e12, half.copied / 1e12, half.reading / 1e12);
            }
        }
    }
} catch (const std::exception& problem) {
    std::fprintf(stderr, "[consumer] survey: %s\n", problem.what());
}

// Multiprocessors on which small blocks of the program run: the median of 20 launches.
int Companion::reached() {
    cudaStream_t stream = nullptr;
    check(program_stream(&stream, 0), "the program's stream");
    std::vector<size_t> found;
    for (int i = 0; i < 20; i++) {
        std::vector<unsigned> seen(n_seen);
        check(cudaMemsetAsync(seen_, 0, n_seen * sizeof *seen_, stream), "counts");
        check(visit_multiprocessors(seen_, 4 * real_, stream), "small blocks");
        check(cudaMemcpyAsync(seen.data(), seen_, n_seen * sizeof *seen_, cudaMemcpyDeviceToHost, stream), "counts");
        check(cudaStreamSynchronize(stream), "small blocks");
        found.push_back(n_seen - static_cast<size_t>(std::count(seen.begin(), seen.end(), 0u)));
    }
    check(cudaStreamDestroy(stream), "a stream");
    std::sort(found.begin(), found.end());
    return static_cast<int>(found[10]);
}

Companion::Found Companion::now() {
    cudaStream_t stream = nullptr;
    check(program_stream(&stream, 0), "the program's stream");
    const unsigned long long read = bytes_read();
    const auto begin = std::chrono::steady_clock::now();
    const double copied = copy(stream);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    check(cudaStreamDestroy(stream), "a stream");
    return {copied, static_cast<double>(bytes_read() - read) / seconds};
}

void Companion::start() try {
    check(cudaGetDevice(&device_), "a device");
    check(real_runtime().cudaDeviceGetAttribute(&real_, cudaDevAttrMultiProcessorCount, device_),
          "a count of multiprocessors");
    check(cudaMalloc(reinterpret_cast<void**>(&buffer_), buffer_bytes), "1 GiB of GPU memory to read");
    check(cudaMalloc(reinterpret_cast<void**>(&copied_), 2 * copied_bytes), "1 GiB of GPU memory to copy");
    check(cudaMalloc(reinterpret_cast<void**>(&read_), sizeof *read_), "GPU memory");
    check(cudaMalloc(reinterpret_cast<void**>(&seen_), n_seen * sizeof *seen_), "GPU memory");
    check(cudaMemset(read_, 0, sizeof *read_), "memory that can be written");
    check(cudaMemset(buffer_, 1, buffer_bytes), "memory that can be written");
    check(cudaMemset(copied_, 1, 2 * copied_bytes), "memory that can be written");
    check(prepare(), "227 KB of shared memory a block");
    check(cudaDeviceSynchronize(), "memory that can be written");
    check(real_runtime().cudaStreamCreateWithFlags(&own_, cudaStreamNonBlocking), "a stream");
    copy(own_);
    alone_ = copy(own_);
    if (number_of("CONSUMER_SURVEY") > 0) survey();
    const char* forced = std::getenv("CONSUMER_DIVISION");  // green, full
    const std::string division = forced ? forced : "";
    if (!(division != "full" && choose(true)) && !(division != "green" && choose(false))) {
        std::fprintf(stderr, "[consumer] expected readers that leave %.2f TB/s; got none\n",
                     card().bytes_per_second / 1e12);
        std::_Exit(2);
    }
    runner_ = std::thread([this] { run(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    before_ = now();
    std::fprintf(stderr,
                 "[consumer] before: %d of %d multiprocessors left (%s; small blocks reached %d), a copy moves %.2f "
                 "TB/s, alone %.2f, of %.2f wanted; readers (%s) move %.2f of %.2f\n",
                 multiprocessors(), real_, green_ ? "green contexts" : "full multiprocessors", reached(),
                 before_.copied / 1e12, alone_ / 1e12, card().bytes_per_second / 1e12,
                 way_ == Way::prefetch ? "prefetch" : "load", before_.reading / 1e12, rate_ / 1e12);
} catch (const std::exception& problem) {
    leave(problem);
}

void Companion::end() try {
    const Found after = now();
    ending_ = true;
    runner_.join();
    std::fprintf(stderr, "[consumer] after: a copy moves %.2f TB/s, readers %.2f\n", after.copied / 1e12,
                 after.reading / 1e12);
    const char* path = std::getenv("CONSUMER_REPORT");
    if (path == nullptr) return;
    if (std::FILE* file = std::fopen(path, "w")) {
        std::fprintf(file,
                     "{\"multiprocessors\": %d, \"of\": %d, \"divided_by\": \"%s\", \"read_by\": \"%s\", "
                     "\"copy_alone_gb_per_s\": %.0f, \"copy_before_gb_per_s\": %.0f, \"copy_after_gb_per_s\": %.0f}\n",
                     multiprocessors(), real_, green_ ? "green contexts" : "full multiprocessors",
                     way_ == Way::prefetch ? "prefetch" : "load", alone_ / 1e9, before_.copied / 1e9,
                     after.copied / 1e9);
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
    const cudaStream_t stream = division_->reading_stream();
    for (uint64_t n = 0; !ending_; n++) {
        if (n >= 2) check(cudaEventSynchronize(ends[n % 2]), "a burst of reading");
        check(read_memory(reading(division_->reading(), way_, rate_, burst_ns), stream), "a burst of reading");
        check(cudaEventRecord(ends[n % 2], stream), "an event");
    }
    check(cudaStreamSynchronize(stream), "a burst of reading");
} catch (const std::exception& problem) {
    leave(problem);
}

}  // namespace consumer
