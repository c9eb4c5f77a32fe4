// A delta net's part of a decode step as one node, which the GPU's executor takes (ops/cuda/recurrent/delta_net.h). Never called.
#pragma once

#include "ggml.h"

namespace lkv {

struct DeltaNetSizes;
struct DeltaNetWeights;

// Its address is the node's userdata. The node's sources are Q, K and V before the convolution, the output's gate, beta, alpha, and the
// slots that are read and written. Where beta and alpha are one tensor it is both.
struct DeltaNetNode {
    const DeltaNetSizes* sizes = nullptr;
    const DeltaNetWeights* weights = nullptr;
    ggml_tensor* conv_states = nullptr;
    ggml_tensor* matrices = nullptr;
    int n_seqs = 1;
    int n_each = 1;
    int n_states = 1;
    float norm_eps = 0;
};

void gpu_delta_net_node(ggml_tensor* dst, int ith, int nth, void* userdata);

}  // namespace lkv
