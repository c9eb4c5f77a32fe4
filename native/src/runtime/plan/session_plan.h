// What a session will do, from what it was asked for and what its model's file says. A session and its forecast use the same plan.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cache/kv_cache.h"
#include "model/model.h"
#include "runtime/plan/session_options.h"

namespace lkv {

struct SessionPlan {
    KvCacheOptions cache;  // and, in cache.runs, the devices
    Prefill prefill = Prefill::eager;
    bool fused = true;
    bool kv_rotate = true;
    int n_threads = 1;
    int n_threads_batch = 1;
    std::vector<std::string> warnings;  // where it differs from what the file is made for
};

// Bytes of a GPU; where the model is one to be described only, its weights are to come.
using FreeOnGpu = std::function<size_t(int gpu)>;

// free: where memory decides something; none given: there is enough.
// Errors: Error for an option out of range, or options that exclude each other.
SessionPlan resolve(const Model& model, const SessionOptions& options, const FreeOnGpu& free = {});

// Errors: Error where no session with these options can run on the model.
void require_runnable(const Model& model, const SessionOptions& options);

}  // namespace lkv
