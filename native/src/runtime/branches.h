// Which layers of a graph compute K, V and the queries at the same time.
#pragma once

#include <span>
#include <vector>

#include "ggml.h"
#include "graph/step/roles.h"

namespace lkv {

// A node that only names memory of another.
bool is_view(const ggml_tensor* node);

// Keeps the layers of a graph allocated for the GPU where none of the three needs another's results or writes what another reads or writes.
std::vector<LayerRoles> concurrent_layers(ggml_cgraph* graph, std::span<const LayerRoles> layers);

}  // namespace lkv
