// A delta net's node in a decode step, as its kernel takes it.
#pragma once

#include <cstring>

#include "decoder/delta_net.h"
#include "ggml-impl.h"
#include "graph/recurrent/gpu_node.h"
#include "model/recurrent/delta_net_weights.h"
#include "ops/cuda/recurrent/delta_net.h"

namespace lkv::cuda {

inline DeltaNetArgs delta_net_args(const ggml_tensor* node) {
    ggml_custom_op_params params;
    std::memcpy(&params, node->op_params, sizeof params);
    const auto& of = *static_cast<const DeltaNetNode*>(params.userdata);
    const auto floats = [](const ggml_tensor* t) { return static_cast<const float*>(t->data); };
    DeltaNetArgs args{};
    args.qkv = floats(node->src[0]);
    args.gate = floats(node->src[1]);
    args.beta = floats(node->src[2]);
    args.alpha = floats(node->src[3]);
    args.kernels = floats(of.weights->conv);
    args.decay = floats(of.weights->decay);
    args.decay_bias = floats(of.weights->decay_bias);
    args.norm = floats(of.weights->norm);
    args.conv_states = static_cast<float*>(of.conv_states->data);
    args.matrices = static_cast<float*>(of.matrices->data);
    args.from = static_cast<const int32_t*>(node->src[4]->data);
    args.to = static_cast<const int64_t*>(node->src[5]->data);
    args.out = static_cast<float*>(node->data);
    const auto row = [&](int i) { return static_cast<int32_t>(node->src[i]->nb[1] / sizeof(float)); };
    args.qkv_row = row(0);
    args.gate_row = row(1);
    args.beta_row = row(2);
    args.alpha_row = row(3);
    args.n_k = of.sizes->n_k_heads;
    args.n_v = of.sizes->n_v_heads;
    args.head_dim = of.sizes->head_dim;
    args.d_conv = of.sizes->d_conv;
    args.n_seqs = of.n_seqs;
    args.n_each = of.n_each;
    args.n_states = of.n_states;
    args.grouped = of.weights->beta_alpha != nullptr ? 1 : 0;
    args.norm_eps = of.norm_eps;
    return args;
}

}  // namespace lkv::cuda
