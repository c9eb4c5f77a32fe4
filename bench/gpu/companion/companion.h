// Keeps memory busy from some multiprocessors while a program runs on the others.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <thread>

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
    bool reads;   // false: memory stays as fast as it is
};

const Card& card();

class Companion {
public:
    void start();
    void end();
    double light();
    double steer();
    double mhz();
    int multiprocessors() const { return std::min(real_ - n_readers_, card().multiprocessors); }

private:
    // Bytes a second.
    struct Found {
        double copied;       // read and written
        double read;         // by a program that writes nothing
        double light;        // by one that has as little in flight as most programs
        double reading = 0;  // by the readers
        double mhz = 0;      // of the multiprocessors
    };
    void place(int n);
    Found beside(double rate);
    void choose();
    bool given();
    void run();
    void watch();
    void report(const Found* after);
    int reached();
    Found now();
    void read(double rate);
    unsigned long long bytes_read();
    double moved(bool written, int light, int n);

    int device_ = 0;
    int real_ = 0;
    char* buffer_ = nullptr;
    char* copied_ = nullptr;
    unsigned long long* read_ = nullptr;
    unsigned* seen_ = nullptr;
    int64_t* ticked_ = nullptr;
    cudaStream_t own_ = nullptr;      // as the program's
    cudaStream_t readers_ = nullptr;  // places.h
    int n_readers_ = 0;
    std::atomic<double> rate_{0.0};  // bytes a second that all readers ask for; 0: as many as they can
    uint64_t n_readings_ = 0;
    Found alone_{};
    Found before_{};
    std::atomic<int64_t> seen_alive_{0};  // seconds of the steady clock
    std::atomic<bool> measuring_{true};   // else the companion has nothing on the GPU but readers
    std::atomic<bool> ending_{false};
    std::atomic<bool> ended_{false};
    std::thread runner_;
    std::thread watcher_;
};

}  // namespace consumer
