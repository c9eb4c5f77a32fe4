// What a session takes, before any of it is allocated.
#pragma once

#include <cstddef>
#include <vector>

#include "runtime/plan/session_plan.h"

namespace lkv {

struct Forecast {
    KvBytes cache;
    // Bytes for each run of layers: a full ubatch's graphs with one output. A GPU's kernels take scratch beside them.
    std::vector<size_t> compute;
    size_t prefill = 0;  // what a lazily prefilled prompt of n_ctx tokens takes beside that; 0 when prefill is eager
};

// The forecast assumes fused attention, whatever the plan says.
Forecast forecast(const Model& model, const SessionPlan& plan);

}  // namespace lkv
