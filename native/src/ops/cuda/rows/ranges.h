// Many short ranges of bytes, copied by one kernel: a copy of its own for each would take microseconds.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace lkv::cuda {

struct ByteMove {
    uint64_t from;  // offsets
    uint64_t to;
    uint64_t bytes;
};

// moves: n of them, on the device
cudaError_t move_bytes(const ByteMove* moves, int n, const uint8_t* from, uint8_t* to, cudaStream_t stream);

}  // namespace lkv::cuda
