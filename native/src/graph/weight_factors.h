// Numbers that what was multiplied by a weight is multiplied with: NVFP4's, one of a matrix, or one of each expert's.
#pragma once

#include <initializer_list>

#include "graph/step/roles.h"
#include "model/file_tensors.h"

namespace lkv {

// [n_expert], a factor of each expert, as those of the chosen ones, i32 [used, n_tokens]: [1, used, n_tokens]
ggml_tensor* of_chosen(ggml_context* ctx, ggml_tensor* factors, ggml_tensor* chosen);

// Nodes that a graph gets more by with_factors(), at most.
size_t factor_nodes(const WeightFactors& factors);

// A graph of at most n_nodes with a product behind every product with a weight that has a factor; all that read the one read the other, and
// `results` are replaced too, and nodes of `roles` numbered anew. For graphs that have no memory yet.
ggml_cgraph* with_factors(ggml_context* ctx, ggml_cgraph* nodes, const WeightFactors& factors, size_t n_nodes,
                          Roles& roles, std::initializer_list<ggml_tensor**> results);

}  // namespace lkv
