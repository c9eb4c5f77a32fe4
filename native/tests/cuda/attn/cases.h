// What the tests of test_cuda_attn share: cases by name, and shapes that are compared with the contract. Of a kernel they know what
// ops/cuda/kernel.h says: its name, and how the problem is cut.
#pragma once

#include <string>
#include <vector>

#include "attn/attn_case.h"
#include "check.h"
#include "cuda/cuda_case.h"

namespace lkv::test {

// Cases that have one name are one on the command line.
struct Case {
    const char* name;
    void (*run)();
    bool is_long = false;  // minutes under compute-sanitizer
};
using Cases = std::vector<Case>;

Cases beside_cases();
Cases blocks_cases();
Cases choice_cases();
Cases decode_cases();
Cases delta_net_cases();
Cases direct_cases();
Cases expand_cases();
Cases flash_cases();
Cases mla_cases();
Cases own_steps_cases();
Cases prefill_cases();
Cases regions_cases();
Cases rows_cases();
Cases softmax_cases();
Cases step_cases();
Cases wide_cases();

// f16 rows enter the products as they are; other rows are rounded to f16 once, rebuilt keys twice more.
inline constexpr double exact_tolerance = 1e-3;
inline constexpr double rounded_tolerance = 2.5e-3;
// The offset of codes is made of a row's scale and rounded to f16, where other rows store it: a fiftieth of what codes of 6 bits lose.
inline constexpr double scaled_tolerance = 4e-3;

double tolerance_of(const AttnShape& s);

inline std::string kernel_of(const DeviceCase& device) { return device.args.kernel->name; }

// By the kernel that takes the shape, as planned, with less shared memory and in other parts.
void compare(const AttnShape& shape);
// The largest error that `compare` has seen.
void print_largest();

// A short case of a kernel, which is to take it.
struct Sample {
    const char* kernel;
    int n_kv, rep, group, k_rank, v_rank;  // rank 0: full
    bool rebuild;
    Format format;
    int n_tokens = 1, n_past = 150, n_regions = 1;
    int n_split = 0;  // 0: as planned
    int head_dim = 128;
};
void compare_samples(const std::vector<Sample>& samples);

// Rows that are keys, and behind their turned channels values: all query heads read one.
using Segments = std::vector<SegmentSpec>;
struct OneRow {
    const char* name;
    const char* kernel;
    int heads, turned;
    std::vector<Segments> rows;  // of every region
    int n_tokens = 1, n_past = 150, n_seq = 1, n_split = 0;
    bool small = false;  // a device with 99 KB of shared memory a thread block
    bool apart = false;
};
Segments whole(Format format);
Segments falling_bits();
void compare_one_rows(const std::vector<OneRow>& rows, unsigned seed);

// Heads of two query heads each that share one latent of K and of V in q4.
AttnShape one_latent(const char* name, int heads, int k_rank, int v_rank, int n_past);

// Blocks of n values times the orthonormal Hadamard matrix.
std::vector<double> times_hadamard(const std::vector<double>& x, int n);

}  // namespace lkv::test
