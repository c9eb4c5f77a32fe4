// Weights that are computed with elsewhere than in the mapped file.
#pragma once

#include <span>
#include <vector>

#include "devices/layer_runs.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "model/dequantized.h"
#include "model/weights.h"

namespace lkv {

// Some weight types multiply faster in an interleaved layout: those few of `layers` are copied, the rest stay in the mapped file.
// Errors: Error where there is no room.
std::vector<ggml_backend_buffer_ptr> interleave(std::span<const LayerWeights> layers);

// Copies weights into one buffer of a run's memory. holds: what else is there, for the log. Errors: Error where there is no room.
ggml_backend_buffer_ptr move_weights(std::span<ggml_tensor* const> weights, const Dequantized& dequantized,
                                     const LayerRun& run, ggml_backend_buffer_type_t memory, const char* holds);

}  // namespace lkv
