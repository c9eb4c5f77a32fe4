#include <array>
#include <atomic>

#include "ops/cuda/gpu/chain.cuh"

namespace lkv::cuda {

namespace {

// Compiled for the architectures of all others.
__global__ void probe_kernel() {}

}  // namespace

// Asked before every launch: looked up once for each device.
bool device_chains() {
    enum Answer : char { unknown, no, yes };
    static std::array<std::atomic<Answer>, 64> answers{};
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return false;
    const auto ask = [] { return compiled(probe_kernel).ptxVersion >= 90 ? yes : no; };
    if (device >= static_cast<int>(answers.size())) return ask() == yes;
    std::atomic<Answer>& answer = answers[static_cast<size_t>(device)];
    if (answer == unknown) answer = ask();
    return answer == yes;
}

}  // namespace lkv::cuda
