// A tile of stored rows as f16 matrices in shared memory, for products with many queries: decoded, or rebuilt from a latent.
#pragma once

#include "ops/cuda/args.h"
#include "ops/cuda/gpu/mma.cuh"
#include "ops/cuda/rows/dequant.cuh"
#include "ops/cuda/shared_plan.h"
#include "ops/cuda/step/angle.cuh"

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
            const bool stored = with_chunk(row[0], chunk, [&](const auto& reader) {
                using Reader = std::remove_cvref_t<decltype(reader)>;
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

// K of one head from its latent: products with B, bias, norm, RoPE. out: f16 [tile][pitch bytes], dimensions in the order of
// plane_dim: both of a plane come to one thread; tiles up to padded_tiles are zero. Rows of free slots are left as garbage: their
// scores are masked.
template <int TILE, int warps>
__device__ inline void rebuild_side(const AttnArgs& p, int head, int warp, const TileSource& from, const Chunk* chunks,
                                    uint8_t* out, int pitch, int padded_tiles) {
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int c = lane % 4;
    constexpr int n_m = TILE / 16;
    constexpr int sharing = warps / n_m;  // warps that share 16 slots
    static_assert(sharing >= 1);
    constexpr int at_once = 4;  // tiles of 16 dimensions
    const int m = warp % n_m;
    const int n_tiles = plane_tiles(p.head_dim, p.n_rot);
    // past the last slot there may be nothing to read
    const uint8_t* const upper = from.k + min(16 * m + g, from.n - 1) * from.k_step;
    const uint8_t* const lower = from.k + min(16 * m + g + 8, from.n - 1) * from.k_step;

    // the values of dimensions 2c and 2c + 1 of half h of tile t
    const auto at_dims = [&](const float* values, int t, int h) {
        const int x = plane_dim(p.head_dim, p.n_rot, p.rope_neox != 0, 16 * t + 8 * h + 2 * c);
        const int y = plane_dim(p.head_dim, p.n_rot, p.rope_neox != 0, 16 * t + 8 * h + 2 * c + 1);
        return make_float2(x >= 0 ? values[x] : 0.0f, y >= 0 ? values[y] : 0.0f);
    };
    // acc[t][h]: dimensions 16·(t0 + t) + 8h + 2c (+1) of slots g, g + 8
    const auto product = [&](int t0, float (&acc)[at_once][2][4]) {
#pragma unroll
        for (int t = 0; t < at_once; t++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 bias =
                    p.k_bias != nullptr ? at_dims(p.k_bias + head * p.head_dim, t0 + t, h) : make_float2(0.0f, 0.0f);
                acc[t][h][0] = acc[t][h][2] = bias.x;
                acc[t][h][1] = acc[t][h][3] = bias.y;
            }
        }
#pragma unroll 1
        for (int b = 0; b < p.k_blocks; b++) {
            uint32_t x[8];
            uint32_t y[8];
            two_slots(upper, lower, chunks[4 * b + c], x, y);
            const uint2* const factor = reinterpret_cast<const uint2*>(p.k_b_planes) +
                                        (static_cast<int64_t>(head * p.k_blocks + b) * n_tiles + t0) * 2 * 4 * 32 +
                                        lane;
#pragma unroll
            for (int t = 0; t < at_once; t++) {
                if (t0 + t < n_tiles) {
#pragma unroll
                    for (int s = 0; s < 4; s++) {
                        const uint32_t a[4] = {x[s], y[s], x[s + 4], y[s + 4]};
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const uint2 f = __ldg(factor + ((2 * t + h) * 4 + s) * 32);
                            mma(acc[t][h], a, f.x, f.y);
                        }
                    }
                }
            }
        }
    };
    float inverse[2] = {1.0f, 1.0f};
    if (p.k_norm != nullptr) {
        float power[2] = {};
        for (int t0 = 0; t0 < n_tiles; t0 += at_once) {
            float acc[at_once][2][4];
            product(t0, acc);
#pragma unroll
            for (int t = 0; t < at_once; t++) {
#pragma unroll
                for (int e = 0; e < 8; e++) power[e / 2 % 2] += acc[t][e / 4][e % 4] * acc[t][e / 4][e % 4];
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            power[i] += __shfl_xor_sync(0xffffffffu, power[i], 1);
            power[i] += __shfl_xor_sync(0xffffffffu, power[i], 2);
            inverse[i] = rsqrtf(power[i] / static_cast<float>(p.head_dim) + p.k_norm_eps);
        }
    }
    const int rotated_tiles = (p.n_rot / 2 + 7) / 8;
    int position[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int slot = 16 * m + g + 8 * i;
        position[i] = slot < from.n ? from.pos[slot] : 0;
    }
#pragma unroll 1
    for (int t0 = warp / n_m * at_once; t0 < padded_tiles; t0 += sharing * at_once) {
        float acc[at_once][2][4];
        product(t0, acc);
#pragma unroll
        for (int t = 0; t < at_once; t++) {
            if (t0 + t >= padded_tiles) continue;
            if (p.k_norm != nullptr) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float2 by = at_dims(p.k_norm, t0 + t, h);
#pragma unroll
                    for (int e = 0; e < 4; e++) acc[t][h][e] *= inverse[e / 2] * (e % 2 == 0 ? by.x : by.y);
                }
            }
            if (t0 + t < rotated_tiles) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int plane = 8 * (t0 + t) + 2 * c + e % 2;
                    const auto [cosine, sine] =
                        plane < p.n_rot / 2 ? angle_of(p, plane, position[e / 2]) : make_float2(1.0f, 0.0f);
                    const float x = acc[t][0][e];
                    const float y = acc[t][1][e];
                    acc[t][0][e] = (x * cosine - y * sine) * p.rope_mscale;
                    acc[t][1][e] = (x * sine + y * cosine) * p.rope_mscale;
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint8_t* const to = out + (16 * m + g + 8 * i) * pitch + 2 * (16 * (t0 + t) + 2 * c);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    *reinterpret_cast<uint32_t*>(to + 16 * h) =
                        bits(__floats2half2_rn(acc[t][h][2 * i], acc[t][h][2 * i + 1]));
                }
            }
        }
    }
}

}  // namespace lkv::cuda
