// A tile of stored rows as f16 matrices in shared memory, for products with many queries: decoded, or rebuilt from a latent.
#pragma once

#include "ops/cuda/angle.cuh"
#include "ops/cuda/args.h"
#include "ops/cuda/dequant.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

// Where a tile's bytes are: staged in shared memory, or still in the cache.
struct TileSource {
    const uint8_t* k;
    const uint8_t* v;
    int64_t k_step;  // bytes from slot to slot
    int64_t v_step;
    const uint64_t* seq;
    const int32_t* pos;
    int n;  // slots that exist

    __device__ bool used(int slot) const { return slot < n && seq[slot] != 0; }
};

// out: f16 [tile][pitch bytes], 16 channels of a chunk in the order of its pairs. A warp takes one chunk of 32 slots, so that
// all its lanes decode one format; free slots hold anything, NaN too, and become zeros.
template <int TILE, int warps>
__device__ inline void decode_side(int warp, const TileSource& from, const uint8_t* rows, int64_t step,
                                   const Chunk* chunks, int n_chunks, uint8_t* out, int pitch) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int item = warp; item < n_chunks * (TILE / 32); item += warps) {
        const int j = item / (TILE / 32);
        const int slot = lane + item % (TILE / 32) * 32;
        const Chunk chunk = chunks[j];
        uint32_t x[8] = {};
        if (from.used(slot)) pairs_of_chunk(rows + slot * step, chunk, x);
        auto* const to = reinterpret_cast<uint4*>(out + slot * pitch + 32 * j);
        to[0] = make_uint4(x[0], x[1], x[2], x[3]);
        to[1] = make_uint4(x[4], x[5], x[6], x[7]);
    }
}

// K of one head from its latent: products with B, bias, norm, RoPE. out: f16 [tile][pitch bytes], dimensions in the order of
// plane_dim: both of a plane come to one thread. Rows of free slots are left as garbage: their scores are masked.
template <int TILE, int warps>
__device__ inline void rebuild_side(const AttnArgs& p, int head, int warp, const TileSource& from, const Chunk* chunks,
                                    uint8_t* out, int pitch) {
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
    for (int t0 = warp / n_m * at_once; t0 < n_tiles; t0 += sharing * at_once) {
        float acc[at_once][2][4];
        product(t0, acc);
#pragma unroll
        for (int t = 0; t < at_once; t++) {
            if (t0 + t >= n_tiles) continue;
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
