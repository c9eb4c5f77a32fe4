// Reads memory on some multiprocessors while a program runs on the others.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "memory.h"

namespace consumer {

// What the program shall find (consumer.py, in the environment).
struct Card {
    double bytes_per_second;
    int shared_bytes;  // a block's
    int major;
    int minor;
    int multiprocessors;
    int threads;  // of a multiprocessor
};

const Card& card();

// Where the multiprocessors are divided: by green contexts, or, where the driver has none, by blocks that fill theirs.
class Division {
public:
    // n: multiprocessors that read; more where the driver divides by eights.
    Division(int real, int n, bool green);
    ~Division();
    Division(const Division&) = delete;
    Division& operator=(const Division&) = delete;

    bool valid() const { return problem_.empty(); }
    const std::string& problem() const { return problem_; }
    int reading() const { return reading_; }
    cudaStream_t reading_stream() const { return stream_; }
    cudaError_t program_stream(cudaStream_t* stream, int priority) const;

private:
    int reading_ = 0;
    CUgreenCtx contexts_[2] = {};  // reading, the program's
    cudaStream_t stream_ = nullptr;
    std::string problem_;
};

class Companion {
public:
    void start();
    void end();
    int multiprocessors() const { return real_ - division_->reading(); }
    cudaError_t program_stream(cudaStream_t* stream, int priority) const {
        return division_->program_stream(stream, priority);
    }

private:
    struct Found {
        double copied;   // bytes a second
        double reading;  // bytes a second, at the same time
    };
    Found beside(const Division& division, Way way, double rate);
    bool choose(bool green);
    void survey();
    void run();
    int reached();
    unsigned long long bytes_read();
    Found now();
    Reading reading(int blocks, Way way, double rate, int64_t ns);
    double copy(cudaStream_t stream);

    int device_ = 0;
    int real_ = 0;
    char* buffer_ = nullptr;
    char* copied_ = nullptr;
    unsigned long long* read_ = nullptr;
    unsigned* seen_ = nullptr;
    cudaStream_t own_ = nullptr;
    uint64_t n_readings_ = 0;
    double alone_ = 0.0;
    Division* division_ = nullptr;  // as long as the program
    bool green_ = false;
    Way way_ = Way::prefetch;
    double rate_ = 0.0;
    Found before_{};
    std::atomic<bool> ending_{false};
    std::thread runner_;
};

}  // namespace consumer
