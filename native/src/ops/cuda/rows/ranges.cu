#include "ops/cuda/rows/ranges.h"

namespace lkv::cuda {

namespace {

constexpr int move_threads = 128;

template <class Word>
__device__ void copy_words(const uint8_t* from, uint8_t* to, uint64_t bytes) {
    const auto* const words = reinterpret_cast<const Word*>(from);
    for (uint64_t i = threadIdx.x; i < bytes / sizeof(Word); i += move_threads) {
        reinterpret_cast<Word*>(to)[i] = words[i];
    }
}

// grid: moves
__global__ void __launch_bounds__(move_threads)
    move_bytes_kernel(const ByteMove* moves, const uint8_t* from, uint8_t* to) {
    const ByteMove move = moves[blockIdx.x];
    const uint8_t* const source = from + move.from;
    uint8_t* const target = to + move.to;
    const auto all = reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target) | move.bytes;
    if (all % sizeof(uint4) == 0) return copy_words<uint4>(source, target, move.bytes);
    if (all % sizeof(uint32_t) == 0) return copy_words<uint32_t>(source, target, move.bytes);
    copy_words<uint8_t>(source, target, move.bytes);
}

}  // namespace

cudaError_t move_bytes(const ByteMove* moves, int n, const uint8_t* from, uint8_t* to, cudaStream_t stream) {
    move_bytes_kernel<<<static_cast<unsigned>(n), move_threads, 0, stream>>>(moves, from, to);
    return cudaGetLastError();
}

}  // namespace lkv::cuda
