// StepFit (cache/formats/fit.h) of one wide segment by a whole thread block, bit for bit: storing 512, 1024 and 2048 channels of q4
// takes 6.6, 9.0 and 13.7 us, by sixteen lanes 7.5, 12.4 and 22.1. What has no order is shared out: every thread finds the levels
// of its own channels, and sums of levels, multiples of a quarter that f32 holds exactly, are added as integers. Only sums of
// values are in the host's order, one after another: a warp's 32 lanes have one each, of two starts, two sums and eight vector lanes.
#pragma once

#include "cache/formats.h"

namespace lkv::cuda {

constexpr int fit_threads = 512;
constexpr int fit_warps = fit_threads / 32;
constexpr int least_fit_width = 256;  // channels; fewer are as fast by sixteen lanes
constexpr int most_fit_width = 2048;

// Bits of a format that is fitted so, 0 of another: above 4 bits sums of levels are not exact.
__host__ __device__ inline int fit_bits(int32_t format) {
    switch (static_cast<Format>(format)) {
        case Format::q4:
        case Format::g4:
            return 4;
        case Format::q3:
        case Format::g3:
            return 3;
        case Format::q2:
        case Format::g2:
            return 2;
        case Format::q1:
        case Format::g1:
            return 1;
        default:
            return 0;
    }
}
__host__ __device__ inline bool fit_has_centre(int32_t format) {
    const auto of = static_cast<Format>(format);
    return of == Format::q4 || of == Format::q3 || of == Format::q2 || of == Format::q1;
}

// A vector lane's values lie together, those of the next so far away that eight start in different banks.
__host__ __device__ constexpr int fit_pitch(int width) { return (width / 8 + 3) / 4 * 4 + 4; }

// Floats of shared memory: [2 starts][values, levels][8][pitch].
__host__ __device__ constexpr int fit_floats(int width) { return 4 * 8 * fit_pitch(width); }

// Floats as integers in the same order, and back.
__device__ inline int ordered(float x) {
    const int bits = __float_as_int(x);
    return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ inline float from_ordered(int bits) { return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff)); }

// x: [width] in shared memory; space: [fit_floats(width)], 16-byte aligned. By all fit_threads; the result is the first warp's.
__device__ inline Step fit_by_block(const float* x, int width, int bits, bool has_centre, float* space) {
    __shared__ int partial[fit_warps][4];
    __shared__ float steps[2][3];  // centre, scale, inverse
    __shared__ bool fits;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int pitch = fit_pitch(width);
    const int n_quads = pitch / 4 - 1;
    const int most = (1 << bits) - 1;
    const float z = static_cast<float>(most) * 0.5f;
    const auto values = [&](int start) { return space + start * 16 * pitch; };
    const auto levels = [&](int start) { return space + start * 16 * pitch + 8 * pitch; };

    // of the first warp's lanes
    const int start = lane / 16;
    const bool with_levels = lane / 8 % 2 != 0;
    const int lane8 = lane % 8;
    const auto add_up = [&](float s) {
        for (int o = 4; o > 0; o /= 2) s += __shfl_xor_sync(0xffffffffu, s, o);
        return s;
    };
    // Σ by(value, level) over a vector lane, in order
    const auto in_order = [&](const float* of, const float* weights, auto&& add) {
        const auto* const a = reinterpret_cast<const float4*>(of + lane8 * pitch);
        const auto* const b = reinterpret_cast<const float4*>(weights + lane8 * pitch);
        float s = 0.0f;
#pragma unroll 4
        for (int k = 0; k < n_quads; k++) {
            const float4 v = a[k];
            const float4 w = b[k];
            s = add(v.x, w.x, s);
            s = add(v.y, w.y, s);
            s = add(v.z, w.z, s);
            s = add(v.w, w.w, s);
        }
        return s;
    };

    // what fills a row up adds nothing
    if (width / 8 % 4 != 0 && threadIdx.x < 32) {
        for (int k = width / 8; k < 4 * n_quads; k++) space[lane * pitch + k] = 0.0f;
    }
    int low = ordered(x[0]);
    int high = low;
    for (int i = threadIdx.x; i < width; i += fit_threads) {
        const float value = x[i];
        values(0)[i % 8 * pitch + i / 8] = value;
        low = min(low, ordered(value));
        high = max(high, ordered(value));
    }
    low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
    if (lane == 0) {
        partial[warp][0] = low;
        partial[warp][1] = high;
    }
    __syncthreads();

    const float n = static_cast<float>(width);
    Step widest{};
    Step step{};
    Step best{};
    float gain = -1.0f;
    bool ended = false;
    if (warp == 0) {
        const float least = from_ordered(__reduce_min_sync(0xffffffffu, partial[lane % fit_warps][0]));
        const float greatest = from_ordered(__reduce_max_sync(0xffffffffu, partial[lane % fit_warps][1]));
        const float middle = has_centre ? 0.5f * (least + greatest) : 0.0f;
        const float reach = has_centre ? greatest - middle : fmaxf(greatest, -least);
        widest = {reach / z, middle};
        if (lane == 0) fits = reach > 1e-12f && reach < 1e12f;
        float mean = 0.0f;
        if (has_centre)
            mean = add_up(in_order(values(0), values(0), [](float v, float, float s) { return s + v; })) / n;
        const int left = width / 8 % 4 != 0 ? 4 * n_quads - width / 8 : 0;  // zeros that are no values
        float power = 0.0f;
        if (left == 0) {
            power = in_order(values(0), values(0), [&](float v, float, float s) {
                const float y = v - mean;
                return fmaf(y, y, s);
            });
        } else {
            for (int k = 0; k < width / 8; k++) {
                const float y = values(0)[lane8 * pitch + k] - mean;
                power = fmaf(y, y, power);
            }
        }
        power = add_up(power);  // by all lanes
        step = start == 0 ? widest : Step{sqrtf(power / n) * gaussian_step(bits), mean};
        best = widest;
    }
#pragma unroll 1
    for (int k = 0; k < n_refine; k++) {
        if (warp == 0 && lane % 16 == 0) {
            steps[start][0] = step.centre;
            steps[start][1] = step.scale;
            steps[start][2] = 1.0f / step.scale;
        }
        __syncthreads();
        if (!fits) return widest;
        int sums[2][2] = {};  // of twice the level, and of its square
        for (int i = threadIdx.x; i < width; i += fit_threads) {
            const float value = x[i];
            const int to = i % 8 * pitch + i / 8;
#pragma unroll
            for (int s = 0; s < 2; s++) {
                const float y = value - steps[s][0];
                const float code = truncf(fminf(fmaxf(fmaf(y, steps[s][2], z + 0.5f), 0.0f), 2 * z));
                const int twice = 2 * static_cast<int>(code) - most;
                values(s)[to] = y;
                levels(s)[to] = code - z;
                sums[s][0] += twice;
                sums[s][1] += twice * twice;
            }
        }
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const int sum = __reduce_add_sync(0xffffffffu, sums[s / 2][s % 2]);
            if (lane == 0) partial[warp][s] = sum;
        }
        __syncthreads();
        if (warp != 0) continue;
        // the lanes of the first sum multiply by one: a fused sum of v · 1 is that of v
        const float own = add_up(in_order(values(start), levels(start), [&](float v, float level, float s) {
            return fmaf(v, with_levels ? level : 1.0f, s);
        }));
        int twice[2] = {partial[lane % 16][2 * start], partial[lane % 16][2 * start + 1]};
        for (int o = 8; o > 0; o /= 2) {
            twice[0] += __shfl_xor_sync(0xffffffffu, twice[0], o);
            twice[1] += __shfl_xor_sync(0xffffffffu, twice[1], o);
        }
        const float other = __shfl_xor_sync(0xffffffffu, own, 8);
        const float m_x = with_levels ? other : own;
        const float m_xl = with_levels ? own : other;
        const float m_l = 0.5f * static_cast<float>(twice[0]);
        const float m_ll = 0.25f * static_cast<float>(twice[1]);
        const float l_mean = has_centre ? m_l / n : 0.0f;
        const float xl = fmaf(-l_mean, m_x, m_xl);
        const float ll = fmaf(-l_mean, m_l, m_ll);
        ended = ended || !(xl > 0.0f && ll > 0.0f);
        if (!ended) {
            step.scale = xl / ll;
            if (has_centre) step.centre += fmaf(-step.scale, l_mean, m_x / n);
            if (xl * step.scale > gain) {
                best = step;
                gain = xl * step.scale;
            }
        }
    }
    if (warp != 0) return widest;
    const Step of_second{__shfl_sync(0xffffffffu, best.scale, 16), __shfl_sync(0xffffffffu, best.centre, 16)};
    const Step of_first{__shfl_sync(0xffffffffu, best.scale, 0), __shfl_sync(0xffffffffu, best.centre, 0)};
    const float second_gain = __shfl_sync(0xffffffffu, gain, 16);
    const float first_gain = __shfl_sync(0xffffffffu, gain, 0);
    return second_gain > first_gain ? of_second : of_first;
}

}  // namespace lkv::cuda
