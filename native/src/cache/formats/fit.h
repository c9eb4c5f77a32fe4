// The step and centre of a uniform quantizer that minimises the squared error of one segment.
//
//   value = centre + level · scale,   level = −z, −z + 1, … z,   z = (2^b − 1) / 2
//
// Levels and least-squares parameters alternate (Lloyd's iteration with the levels tied to one step) from two starts:
// the one that reaches every value, and the optimal step for a Gaussian of the same power (Max 1960), which is what a
// rotated segment looks like. The better end wins. Squared error relative to the power of 128 Gaussian channels, scale and
// minimum spanning the segment -> fitted: 4 bits 0.0100 -> 0.0090, 3 bits 0.046 -> 0.034, 2 bits 0.25 -> 0.11, 1 bit 3.5 -> 0.35.
#pragma once

#include <cmath>

#include "cache/formats/planes.h"

namespace lkv {

struct Step {
    float scale;
    float centre;
};

constexpr int n_refine = 3;

// Optimal step of a 2^bits-level uniform quantizer for a Gaussian of standard deviation 1.
LKV_HD constexpr float gaussian_step(int bits) {
    constexpr float step[9] = {0.0f, 1.5958f, 0.9957f, 0.5860f, 0.3352f, 0.1881f, 0.1041f, 0.0569f, 0.0308f};
    return step[bits];
}

// x: [width], width a multiple of 16
LKV_HD inline void extremes(const float* x, int width, float& low, float& high) {
#if defined(__CUDACC__)
#pragma unroll 4
    for (int i = writer(); i < width; i += writers) {
        low = fminf(low, x[i]);
        high = fmaxf(high, x[i]);
    }
    low = across<writers>(low, [](float a, float b) { return fminf(a, b); });
    high = across<writers>(high, [](float a, float b) { return fmaxf(a, b); });
#else
    f32x8 l = load8(x);
    f32x8 h = l;
    for (int i = lanes; i < width; i += lanes) {
        l = min8(load8(x + i), l);
        h = max8(load8(x + i), h);
    }
    low = -max(-l);
    high = max(h);
#endif
}

template <int Bits>
class StepFit {
public:
    static constexpr float z = Planes<Bits>::levels / 2.0f;

    // x: [width], width a multiple of 16
    LKV_HD static Step fit(const float* x, int width) {
        float low = x[0];
        float high = x[0];
        extremes(x, width, low, high);
        const float n = static_cast<float>(width);
        const float middle = 0.5f * (low + high);
        const float reach = high - middle;
        const Step widest{reach / z, middle};
        // Outside this range the squares below leave float's range.
        if (!(reach > 1e-12f && reach < 1e12f)) return widest;

        const float mean = sum(x, width) / n;
        const Step starts[2] = {widest, {sqrtf(power(x, width, mean) / n) * gaussian_step(Bits), mean}};
        Ended best{widest, -1.0f};
        for (int s = first_start(); s < 2; s += starts_at_once) {
            Step step = starts[s];
#if defined(__CUDACC__)
#pragma unroll 1
#endif
            for (int k = 0; k < n_refine; k++) {
                const Moments m = moments(x, width, step);
                const float l_mean = m.l / n;
                // fused by name: left to the compilers, the last bit differs between machines, and with it which start wins
                const float xl = fmaf(-l_mean, m.x, m.xl);  // covariance, relative to step.centre
                const float ll = fmaf(-l_mean, m.l, m.ll);
                if (!(xl > 0.0f && ll > 0.0f)) break;
                step.scale = xl / ll;
                step.centre += fmaf(-step.scale, l_mean, m.x / n);
                // What the levels explain of the segment's variance: the largest gain is the smallest error.
                if (xl * step.scale > best.gain) best = {step, xl * step.scale};
            }
        }
        return better_half(best);
    }

private:
    struct Ended {
        Step step;
        float gain;
    };

    // On a device half of a segment's lanes go from each start. The first start's end is kept where both gain as much.
#if defined(__CUDA_ARCH__)
    static constexpr int starts_at_once = 2;
    __device__ static int first_start() { return writer() / adders; }
    __device__ static Step better_half(const Ended& own) {
        const Ended other{{from_other_half(own.step.scale), from_other_half(own.step.centre)},
                          from_other_half(own.gain)};
        const bool own_wins = first_start() == 0 ? !(other.gain > own.gain) : own.gain > other.gain;
        return own_wins ? own.step : other.step;
    }
#else
    static constexpr int starts_at_once = 1;
    LKV_HD static constexpr int first_start() { return 0; }
    LKV_HD static Step better_half(const Ended& own) { return own.step; }
#endif

    struct Moments {
        float x;  // Σ (x − centre)
        float l;  // Σ level
        float xl;
        float ll;
    };

#if defined(__CUDACC__)
    // truncf of 0 … 2^22, which a device converts at a quarter of the rate of sums.
    LKV_HD static float whole_part(float x) {
#if defined(__CUDA_ARCH__)
        constexpr float ones = 8388608.0f;  // 2^23: floats from here on are whole
        return __fadd_rz(x, ones) - ones;
#else
        return truncf(x);
#endif
    }

    LKV_HD static float add_up(float x) {
        return across<adders>(x, [](float a, float b) { return a + b; });
    }

    LKV_HD static float sum(const float* x, int width) {
        float s = 0.0f;
#pragma unroll 4
        for (int i = adder(); i < width; i += adders) s += x[i];
        return add_up(s);
    }

    LKV_HD static float power(const float* x, int width, float mean) {
        float p = 0.0f;
#pragma unroll 4
        for (int i = adder(); i < width; i += adders) {
            const float v = x[i] - mean;
            p = fmaf(v, v, p);
        }
        return add_up(p);
    }

    LKV_HD static Moments moments(const float* x, int width, Step step) {
        const float inverse = 1.0f / step.scale;
        Moments m{};
#pragma unroll 8
        for (int i = adder(); i < width; i += adders) {
            const float y = x[i] - step.centre;
            const float level = whole_part(fminf(fmaxf(fmaf(y, inverse, z + 0.5f), 0.0f), 2 * z)) - z;
            m.x += y;
            m.l += level;
            m.xl = fmaf(y, level, m.xl);
            m.ll = fmaf(level, level, m.ll);
        }
        return {add_up(m.x), add_up(m.l), add_up(m.xl), add_up(m.ll)};
    }
#else
    // Two vectors: a fused product waits for the one before it, and a device has a lane for each of the sixteen.
    static float sum(const float* x, int width) {
        f32x8 s[2]{};
        for (int i = 0; i < width; i += 2 * lanes) {
            for (int h = 0; h < 2; h++) s[h] += load8(x + i + h * lanes);
        }
        return lkv::sum(s[0] + s[1]);
    }

    static float power(const float* x, int width, float mean) {
        f32x8 p[2]{};
        for (int i = 0; i < width; i += 2 * lanes) {
            for (int h = 0; h < 2; h++) {
                const f32x8 v = load8(x + i + h * lanes) - splat(mean);
                p[h] = fma8(v, v, p[h]);
            }
        }
        return lkv::sum(p[0] + p[1]);
    }

    static Moments moments(const float* x, int width, Step step) {
        const f32x8 inverse = splat(1.0f / step.scale);
        f32x8 sx[2]{}, sl[2]{}, sxl[2]{}, sll[2]{};
        for (int i = 0; i < width; i += 2 * lanes) {
            for (int h = 0; h < 2; h++) {
                const f32x8 y = load8(x + i + h * lanes) - splat(step.centre);
                const f32x8 code = min8(max8(fma8(y, inverse, splat(z + 0.5f)), f32x8{}), splat(2 * z));
                const f32x8 level = to_f32(__builtin_convertvector(code, i32x8)) - splat(z);
                sx[h] += y;
                sl[h] += level;
                sxl[h] = fma8(y, level, sxl[h]);
                sll[h] = fma8(level, level, sll[h]);
            }
        }
        return {lkv::sum(sx[0] + sx[1]), lkv::sum(sl[0] + sl[1]), lkv::sum(sxl[0] + sxl[1]), lkv::sum(sll[0] + sll[1])};
    }
#endif
};

}  // namespace lkv
