// Which nodes of a layer may run at the same time: those that lead to K alone, to V alone and to the queries alone.
#pragma once

#include <vector>

#include "ggml.h"

namespace lkv {

// A node that only names memory of another.
bool is_view(const ggml_tensor* node);

// Indices of one layer's nodes: what several need lies before `k`, the last product before its last norm at `ahead` (the end of the
// layer before, as a rule; the first node where there is none); [k, v) leads to K alone, [v, store) to V, node `store` writes the rows,
// (store, attention) leads to the queries. Where the attention reads queries of two forms, those of full rows are there before node
// `latent_q`, which goes on from them.
struct Branches {
    int ahead = 0;
    int k = 0;
    int v = 0;
    int store = 0;
    int rope = 0;  // RoPE of the queries before `latent_q`, or the same
    int latent_q = 0;
    int attention = 0;
};

// Finds, in a graph allocated for the GPU, layers where no branch needs another's results or writes what another reads or writes.
std::vector<Branches> find_branches(ggml_cgraph* graph);

}  // namespace lkv
