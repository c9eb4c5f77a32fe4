// Online softmax in three verbs: a state starts empty, absorbs scores tile by tile, and states of disjoint slots merge.
// A state stands for a weighted sum  Σ e^(score − max) · value  with the sum of its weights.
#pragma once

#include <cmath>
#include <limits>

#include "base/vmath.h"
#include "ops/cpu/tile.h"

namespace lkv {

struct SoftmaxState {
    float max = -std::numeric_limits<float>::infinity();
    float sum = 0.0f;
};

// Factor that expresses a state's weighted sum relative to `max` >= state.max; 0 for an empty state.
inline float rebase(const SoftmaxState& state, float max) {
    return state.sum > 0.0f ? std::exp(state.max - max) : 0.0f;
}

inline SoftmaxState merge(const SoftmaxState& a, const SoftmaxState& b) {
    const float max = a.max > b.max ? a.max : b.max;
    return {max, a.sum * rebase(a, max) + b.sum * rebase(b, max)};
}

// 1 / sum, or 0 when nothing was visible: the output is then zeros.
inline float normaliser(const SoftmaxState& state) { return state.sum > 0.0f ? 1.0f / state.sum : 0.0f; }

LKV_INLINE i32x8 lane_mask(uint64_t mask, int vector) {
    constexpr i32x8 bit = {1, 2, 4, 8, 16, 32, 64, 128};
    const int32_t byte = static_cast<int32_t>(mask >> (lanes * vector) & 0xff);
    return (bit & byte) != 0;
}

// Scores of one query against one tile become weights relative to the state's new maximum; masked slots get weight 0.
//   scores: [tile_slots], raw products in, weights out
//   bias(v): eight values added to vector v of the scaled scores (ALiBi), or zeros
// Returns what the weighted sum so far has to be multiplied with.
template <class Bias>
LKV_INLINE float absorb(SoftmaxState& state, float* scores, uint64_t visible, float scale, Bias bias) {
    constexpr int n = tile_slots / lanes;
    constexpr float never = -std::numeric_limits<float>::infinity();
    f32x8 s[n];
    f32x8 highest = splat(never);
    for (int v = 0; v < n; v++) {
        s[v] = fma8(load8(scores + v * lanes), splat(scale), bias(v));
        if (visible != ~uint64_t{0}) s[v] = lane_mask(visible, v) ? s[v] : splat(never);
        highest = max8(highest, s[v]);
    }
    const float max = std::max(state.max, lkv::max(highest));
    const float factor = max == state.max ? 1.0f : rebase(state, max);
    f32x8 total{};
    for (int v = 0; v < n; v++) {
        const f32x8 weight = exp8(s[v] - splat(max));
        store8(scores + v * lanes, weight);
        total += weight;
    }
    state = {max, state.sum * factor + sum(total)};
    return factor;
}

}  // namespace lkv
