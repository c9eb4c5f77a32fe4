// Tiles of rows, of their positions and sequences, into shared memory.
#pragma once

#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/kernels/mla/block.cuh"

namespace lkv::cuda {

// Row s of a staged tile begins at lead(tile) + s · pitch, which is where it begins in memory, modulo 16.
__device__ inline uint32_t staged_lead(const MlaSide& side, const MlaTile& tile) {
    return (side.lead + static_cast<uint32_t>(tile.first) * side.row_bytes) % 16;
}

__device__ inline void copy_rows(uint8_t* stage, const MlaSide& side, const MlaTile& tile) {
    const int pitch = side.pitch;
    if (pitch == 0) return;
    const auto row_bytes = static_cast<int>(side.row_bytes);
    const auto lead = static_cast<int>(staged_lead(side, tile));
    const uint8_t* from = side.rows + static_cast<int64_t>(tile.first) * row_bytes - lead;
    if (pitch == row_bytes) {  // as in memory
        const int end = lead + tile.valid * row_bytes;
        for (int at = 16 * static_cast<int>(threadIdx.x); at < end; at += 16 * mla_threads)
            copy_async<16>(stage + at, from + at);
        return;
    }
    // rows are as far from a multiple of 16 in the tile as in memory
    const int bytes = static_cast<int>(side.bytes);
    const int pieces = side.pieces;
    const int step_rows = side.step_rows;
    const int step_pieces = mla_threads - step_rows * pieces;
    int row = small_quotient(static_cast<int>(threadIdx.x), pieces);
    int piece = static_cast<int>(threadIdx.x) - row * pieces;
    while (row < tile.valid) {
        const int begin = lead + row * row_bytes;
        const int at = (begin & ~15) + 16 * piece;
        if (at < begin + bytes) copy_async<16>(stage + at + row * (pitch - row_bytes), from + at);
        row += step_rows;
        piece += step_pieces;
        if (piece >= pieces) {
            piece -= pieces;
            row++;
        }
    }
}

__device__ inline void copy_marks(MlaMarks& marks, const MlaTile& tile) {
    const int s = static_cast<int>(threadIdx.x);
    if (s >= tile.valid) return;
    copy_async<4>(&marks.pos[s], tile.region->pos + tile.first + s);
    copy_async<8>(&marks.seq[s], tile.region->seq + tile.first + s);
}

}  // namespace lkv::cuda
