// A tile of stored rows as f16 matrices in shared memory, for products with many queries: decoded.
#pragma once

#include "ops/cuda/kernels/prefill/layout.h"
#include "ops/cuda/rows/token_blocks.cuh"

namespace lkv::cuda {

// Where a tile's bytes are: staged in shared memory, or still in the cache.
struct TileSource {
    const uint8_t* k;
    const uint8_t* v;
    int k_step;  // bytes from slot to slot
    int v_step;
    const uint64_t* seq;
    const int32_t* pos;
    int n;  // slots that exist
    Seen seen;
    uint64_t used;  // a bit a slot
};

// The chunks of one side of one region: what they are, and where the run of the same format ends.
struct SideChunks {
    const Chunk* chunk;
    const uint8_t* run_end;
    int n;
};

// Chunks j, j + warps, … before `end`, a word at a time: rows are some 16 bytes apart in their banks, so each eight lanes begin with another
// word of theirs.
template <class Reader, int together, int warps>
__device__ __forceinline__ void decode_words(int lane, int& j, int end, const uint8_t* const (&row)[together],
                                             const SideChunks& side, uint8_t* to, int pitch) {
#pragma unroll 1
    for (; j < end; j += warps) {
        const Chunk chunk = side.chunk[j];
        uint2 x[together][4];
#pragma unroll
        for (int i = 0; i < together; i++) {
            const Reader reader(row[i], chunk);
#pragma unroll
            for (int w = 0; w < 4; w++) x[i][w] = reader.pairs(row[i] + chunk.codes, (w + lane / 8) % 4);
        }
#pragma unroll
        for (int i = 0; i < together; i++) {
#pragma unroll
            for (int w = 0; w < 4; w++) {
                *reinterpret_cast<uint2*>(to + 32 * i * pitch + 32 * j + 8 * ((w + lane / 8) % 4)) = x[i][w];
            }
        }
    }
}

// out: f16 [tile][pitch bytes], 16 channels of a chunk in the order of its pairs. A warp takes every `warps`-th chunk of
// 32 · together slots, so that its lanes decode one format: a run of it in one piece of code, two chunks at a time.
template <int TILE, int warps, int together>
__device__ inline void decode_side(int warp, const TileSource& from, const uint8_t* rows, int step,
                                   const SideChunks& side, uint8_t* out, int pitch) {
    constexpr int passes = TILE / 32 / together;
#pragma unroll 1
    for (int pass = 0; pass < passes; pass++) {
        const int lane = threadIdx.x % 32;
        const int first = lane + 32 * together * pass;
        uint8_t* const to = out + first * pitch;
        const uint8_t* row[together];
#pragma unroll
        for (int i = 0; i < together; i++) row[i] = rows + min(first + 32 * i, from.n - 1) * step;
        const auto put = [&](int i, int j, const uint32_t (&x)[8]) {
            auto* const at = reinterpret_cast<uint4*>(to + 32 * i * pitch + 32 * j);
            at[0] = make_uint4(x[0], x[1], x[2], x[3]);
            at[1] = make_uint4(x[4], x[5], x[6], x[7]);
        };
        constexpr uint32_t zeros[8] = {};
#pragma unroll 1
        for (int j = warp; j < side.n;) {
            const Chunk chunk = side.chunk[j];
            const int end = side.run_end[j];
            if (format_in_token_blocks(static_cast<Format>(chunk.kind))) {
#pragma unroll
                for (int i = 0; i < together; i++) {
                    // slots 32i … of the pass; of what is past the last slot the last block serves
                    const int block = min(first - lane + 32 * i, (from.n - 1) / 32 * 32);
                    uint32_t x[8];
                    pairs_in_block(rows + block * step, min(lane, from.n - 1 - block), step, chunk, x);
                    put(i, j, x);
                }
                j += warps;
                continue;
            }
            const bool stored = with_chunk(row[0], chunk, [&](const auto& reader) {
                using Reader = std::remove_cvref_t<decltype(reader)>;
                if constexpr (reads_words<Reader>) {
                    return decode_words<Reader, together, warps>(lane, j, end, row, side, to, pitch);
                }
                const auto decode = [&](int i, const Chunk& of, uint32_t (&x)[8]) {
                    Reader(row[i], of).all(row[i] + of.codes, x);
                };
                Chunk now = chunk;
#pragma unroll 1
                for (; j + warps < end; j += 2 * warps) {
                    const Chunk other = side.chunk[j + warps];
                    uint32_t x[together][2][8];
#pragma unroll
                    for (int i = 0; i < together; i++) {
                        decode(i, now, x[i][0]);
                        decode(i, other, x[i][1]);
                    }
                    now = side.chunk[min(j + 2 * warps, end - 1)];
#pragma unroll
                    for (int i = 0; i < together; i++) {
                        put(i, j, x[i][0]);
                        put(i, j + warps, x[i][1]);
                    }
                }
                if (j < end) {
#pragma unroll
                    for (int i = 0; i < together; i++) {
                        uint32_t x[8];
                        decode(i, now, x);
                        put(i, j, x);
                    }
                    j += warps;
                }
            });
            if (!stored) {
#pragma unroll
                for (int i = 0; i < together; i++) put(i, j, zeros);
                j += warps;
            }
        }
        // free slots hold anything, NaN too
#pragma unroll
        for (int i = 0; i < together; i++) {
            if ((from.used >> (first + 32 * i) & 1) != 0) continue;
#pragma unroll 1
            for (int j = warp; j < side.n; j += warps) put(i, j, zeros);
        }
    }
}

}  // namespace lkv::cuda
