// The steps that a token may choose from: all in use, or those of its sequence.
#pragma once

#include "ops/cuda/choice/choice.h"

namespace lkv::cuda {

struct StepList {
    int n;
    const int32_t* steps = nullptr;  // null: 0, 1, …

    __device__ StepList(const ChoiceArgs& p, int token) : n((p.n_slots[0] + step_slots - 1) / step_slots) {
        if (p.own.ends == nullptr) return;
        const int begin = p.own.begins != nullptr ? p.own.begins[token] : 0;
        n = p.own.ends[token] - begin;
        steps = p.own.steps + static_cast<int64_t>(token) * p.own.capacity + begin;
    }
    __device__ int at(int i) const { return steps != nullptr ? slot_of_step(steps[i]) / step_slots : i; }
};

}  // namespace lkv::cuda
