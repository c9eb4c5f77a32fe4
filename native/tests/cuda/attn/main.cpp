// The CUDA kernels on the CPU's cases, against the contract in double; rows against the CPU's bytes.
#include <cstdio>
#include <set>

#include "cuda/attn/cases.h"

namespace {

using lkv::test::Case;
using lkv::test::Cases;

Cases all_cases() {
    using namespace lkv::test;
    Cases all;
    for (const auto& cases : {decode_cases, direct_cases, expand_cases, flash_cases, mla_cases, prefill_cases,
                              wide_cases, softmax_cases, own_steps_cases, choice_cases, beside_cases, regions_cases,
                              rows_cases, blocks_cases, step_cases, delta_net_cases}) {
        const Cases more = cases();
        all.insert(all.end(), more.begin(), more.end());
    }
    return all;
}

}  // namespace

// "small" leaves out what takes compute-sanitizer minutes; other arguments name the cases to run.
int main(int argc, char** argv) {
    const Cases all = all_cases();
    std::set<std::string> named(argv + 1, argv + argc);
    const bool small = named.erase("small") > 0;
    std::set<std::string> unknown = named;
    for (const Case& each : all) unknown.erase(each.name);
    if (!unknown.empty()) {
        std::fprintf(stderr, "[cuda_attn] expected the names of cases, or small; got %s\n", unknown.begin()->c_str());
        return 1;
    }
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        std::printf("cuda_attn: skipped: no CUDA device\n");
        return 77;
    }
    for (const Case& each : all) {
        if (small && each.is_long) continue;
        if (named.empty() || named.contains(each.name)) each.run();
    }
    lkv::test::print_largest();
    return lkv::test::report("cuda_attn");
}
