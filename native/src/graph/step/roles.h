// What a graph's nodes are for, noted while they are drawn: whoever runs them need not guess it from their shape.
#pragma once

#include <vector>

#include "ggml.h"

namespace lkv {

// Nodes of one layer, by number. What several branches need lies before `k`: first the layer's input, complete before node `input`, whose
// last product is node `ahead` (the end of the layer before, as a rule). [k, v) leads to K's rows alone, [v, store) to V's, node `store`
// writes both. The queries of full rows, or the only ones, are there before node `latent_q`; those of latents before `attention`.
struct LayerRoles {
    int ahead = 0;
    int input = 0;
    int k = 0;
    int v = 0;
    int store = 0;
    int rope = 0;  // RoPE of the queries right before `latent_q`, or the same
    int latent_q = 0;
    int attention = 0;
};

// A product with a factor of latents. Where several tokens' heads are multiplied at once, x is what was put in another order before and
// result what was put back; else both are null.
struct FactorProduct {
    ggml_tensor* x = nullptr;
    ggml_tensor* product = nullptr;
    ggml_tensor* result = nullptr;
};

struct Roles {
    std::vector<LayerRoles> layers;  // of a fused graph, those with rows of their own
    std::vector<FactorProduct> products;
    std::vector<const ggml_tensor*> stored_rotations;  // Hadamard rotations that nothing but a store of V's rows reads
};

}  // namespace lkv
