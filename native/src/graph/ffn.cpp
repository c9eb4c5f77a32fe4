#include "graph/ffn.h"

#include <cmath>
#include <limits>

#include "graph/weight_factors.h"

namespace lkv {
namespace {

constexpr float oai_alpha = 1.702F;
constexpr float oai_limit = 7.0F;
constexpr int own_nodes = 54;  // without those that add experts up

}  // namespace

ggml_tensor* activated(ggml_context* ctx, Activation activation, ggml_tensor* x) {
    switch (activation) {
        case Activation::silu:
            return ggml_silu(ctx, x);
        case Activation::gelu:
            return ggml_gelu_erf(ctx, x);
        case Activation::gelu_tanh:
            return ggml_gelu(ctx, x);
        case Activation::relu:
            return ggml_relu(ctx, x);
        case Activation::relu2:
            return ggml_sqr(ctx, ggml_relu(ctx, x));
        case Activation::swiglu_oai:  // no plain FFN has it, see block.cpp
        case Activation::xielu:       // see ffn()
            break;
    }
    return x;
}

namespace {

ggml_glu_op gate_of(Activation activation) {
    switch (activation) {
        case Activation::silu:
            return GGML_GLU_OP_SWIGLU;
        case Activation::gelu:
            return GGML_GLU_OP_GEGLU_ERF;
        case Activation::gelu_tanh:
            return GGML_GLU_OP_GEGLU;
        case Activation::relu:
            return GGML_GLU_OP_REGLU;
        case Activation::swiglu_oai:
            return GGML_GLU_OP_SWIGLU_OAI;
        case Activation::xielu:
        case Activation::relu2:
            break;  // of a plain FFN alone
    }
    return GGML_GLU_OP_SWIGLU;
}

// act(gate) · up; without a gate `up` holds [gate | up].
ggml_tensor* gated(ggml_context* ctx, Activation activation, ggml_tensor* gate, ggml_tensor* up) {
    const ggml_glu_op op = gate_of(activation);
    if (op == GGML_GLU_OP_SWIGLU_OAI) return ggml_swiglu_oai(ctx, gate, up, oai_alpha, oai_limit);
    return gate == nullptr ? ggml_glu(ctx, up, op, false) : ggml_glu_split(ctx, gate, up, op);
}

ggml_tensor* linear(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* bias, ggml_tensor* x) {
    x = ggml_mul_mat(ctx, weight, x);
    return bias == nullptr ? x : ggml_add(ctx, x, bias);
}

// Multiplies by the weights of each token's experts. weight [n_in, n_out, n_expert], bias [n_out, n_expert], x [n_in, 1 or used, n_tokens],
// chosen i32 [used, n_tokens] -> [n_out, used, n_tokens]
ggml_tensor* linear_of(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* bias, ggml_tensor* x, ggml_tensor* chosen) {
    x = ggml_mul_mat_id(ctx, weight, x, chosen);
    return bias == nullptr ? x : ggml_add_id(ctx, x, bias, chosen);
}

// The experts of each token, i32 [used, n_tokens], and their weights [1, used, n_tokens].
struct Routing {
    ggml_tensor* chosen;
    ggml_tensor* weights;
};

// Scores [n_expert, n_tokens], -inf in all groups but each token's best ones.
ggml_tensor* of_best_groups(ggml_context* ctx, const HParams& h, ggml_tensor* scores) {
    const ExpertRouting& routing = h.routing;
    const int64_t n_tokens = scores->ne[1];
    const int64_t n_groups = routing.n_groups;
    const int n_best = routing.scores == ExpertRouting::Scores::sigmoid ? 2 : 1;
    ggml_tensor* const groups = ggml_reshape_3d(ctx, scores, h.n_expert / n_groups, n_groups, n_tokens);
    ggml_tensor* const best = ggml_argsort_top_k(ctx, groups, n_best);  // [n_best, n_groups, n_tokens]
    ggml_tensor* of_groups =
        ggml_get_rows(ctx, ggml_reshape_4d(ctx, groups, 1, groups->ne[0], n_groups, n_tokens), best);
    of_groups = ggml_sum_rows(ctx, ggml_reshape_3d(ctx, of_groups, n_best, n_groups, n_tokens));
    of_groups = ggml_reshape_2d(ctx, of_groups, n_groups, n_tokens);
    ggml_tensor* const chosen = ggml_argsort_top_k(ctx, of_groups, routing.n_groups_used);
    ggml_tensor* const kept = ggml_get_rows(ctx, groups, chosen);  // [n_expert / n_groups, n_groups_used, n_tokens]
    ggml_tensor* const none = ggml_fill(ctx, groups, -std::numeric_limits<float>::infinity());
    return ggml_reshape_2d(ctx, ggml_set_rows(ctx, none, kept, chosen), h.n_expert, n_tokens);
}

Routing route(ggml_context* ctx, const HParams& h, const LayerWeights& layer, ggml_tensor* x) {
    using Scores = ExpertRouting::Scores;
    const int64_t n_tokens = x->ne[1];
    ggml_tensor* scores = linear(ctx, layer.ffn_gate_inp, layer.ffn_gate_inp_bias, x);  // [n_expert, n_tokens]
    const bool groups = h.routing.n_groups_used < h.routing.n_groups;
    // a softmax whose weights are divided by their sum is that over the chosen ones alone
    const bool is_sigmoid = h.routing.scores == Scores::sigmoid;
    const bool late = h.routing.scores == Scores::softmax_of_chosen ||
                      (h.routing.scores == Scores::softmax && h.block.expert_norm && layer.expert_bias == nullptr);
    if (is_sigmoid && !h.block.ranked_before_sigmoid) {
        scores = ggml_sigmoid(ctx, scores);
    } else if (!is_sigmoid && !late) {
        scores = ggml_soft_max(ctx, scores);
    }
    ggml_tensor* ranked = layer.expert_bias == nullptr ? scores : ggml_add(ctx, scores, layer.expert_bias);
    if (groups) ranked = of_best_groups(ctx, h, ranked);
    ggml_tensor* const chosen = ggml_argsort_top_k(ctx, ranked, h.n_expert_used);
    ggml_tensor* weights = ggml_get_rows(ctx, ggml_reshape_3d(ctx, scores, 1, h.n_expert, n_tokens), chosen);
    if (is_sigmoid && h.block.ranked_before_sigmoid) weights = ggml_sigmoid(ctx, weights);
    if (late || h.block.expert_norm) {
        weights = ggml_reshape_2d(ctx, weights, h.n_expert_used, n_tokens);
        weights = late ? ggml_soft_max(ctx, weights) : ggml_div(ctx, weights, ggml_sum_rows(ctx, weights));
        weights = ggml_reshape_3d(ctx, weights, 1, h.n_expert_used, n_tokens);
    }
    if (h.routing.scale != 1.0F) weights = ggml_scale(ctx, weights, h.routing.scale);
    if (layer.expert_scale != nullptr) weights = ggml_mul(ctx, weights, of_chosen(ctx, layer.expert_scale, chosen));
    return {chosen, weights};
}

// x [n_embd_expert, n_tokens], of which the result has the shape; routed: what the router reads
ggml_tensor* experts(ggml_context* ctx, ggml_cgraph* nodes, const HParams& h, const LayerWeights& layer, ggml_tensor* x,
                     ggml_tensor* routed) {
    const int64_t n_tokens = x->ne[1];
    const Routing to = route(ctx, h, layer, routed);
    ggml_build_forward_expand(nodes, to.weights);
    x = ggml_reshape_3d(ctx, x, h.n_embd_expert, 1, n_tokens);
    ggml_tensor* const up = linear_of(ctx, layer.ffn_up, layer.ffn_up_bias, x, to.chosen);
    ggml_tensor* const gate =
        layer.ffn_gate == nullptr ? nullptr : linear_of(ctx, layer.ffn_gate, layer.ffn_gate_bias, x, to.chosen);
    const bool is_plain = h.block.ffn == Ffn::plain_experts;
    ggml_tensor* y = is_plain ? activated(ctx, h.block.activation, up) : gated(ctx, h.block.activation, gate, up);
    y = linear_of(ctx, layer.ffn_down, layer.ffn_down_bias, y, to.chosen);
    y = ggml_mul(ctx, y, to.weights);  // [n_embd_expert, used, n_tokens]
    ggml_tensor* sum = nullptr;
    for (int i = 0; i < h.n_expert_used; i++) {
        ggml_tensor* const one =
            ggml_view_2d(ctx, y, h.n_embd_expert, n_tokens, y->nb[2], static_cast<size_t>(i) * y->nb[1]);
        sum = sum == nullptr ? one : ggml_add(ctx, sum, one);
    }
    return h.n_expert_used == 1 ? ggml_cont(ctx, sum) : sum;
}

ggml_tensor* normed(ggml_context* ctx, const HParams& h, ggml_tensor* x, ggml_tensor* weight) {
    return ggml_mul(ctx, ggml_rms_norm(ctx, x, h.norm_eps), weight);
}

// A dense FFN and experts, which both read the hidden state, each between norms of its own.
ggml_tensor* dense_and_experts(ggml_context* ctx, ggml_cgraph* nodes, const HParams& h, const LayerWeights& layer,
                               ggml_tensor* x, ggml_tensor* hidden) {
    ggml_tensor* dense =
        gated(ctx, h.block.activation, ggml_mul_mat(ctx, layer.dense_gate, x), ggml_mul_mat(ctx, layer.dense_up, x));
    dense = normed(ctx, h, ggml_mul_mat(ctx, layer.dense_down, dense), layer.dense_post_norm);
    ggml_build_forward_expand(nodes, dense);
    const float root = 1.0F / std::sqrt(static_cast<float>(h.n_embd));
    ggml_tensor* const routed = ggml_scale(ctx, normed(ctx, h, hidden, layer.router_scale), root);
    ggml_tensor* const chosen = experts(ctx, nodes, h, layer, normed(ctx, h, hidden, layer.experts_norm), routed);
    return ggml_add(ctx, dense, normed(ctx, h, chosen, layer.experts_post_norm));
}

// The expert that every token has. x [n_embd, n_tokens], of which the result has the shape.
ggml_tensor* shared_expert(ggml_context* ctx, const HParams& h, const LayerWeights& layer, ggml_tensor* x) {
    ggml_tensor* const up = ggml_mul_mat(ctx, layer.shared_up, x);
    ggml_tensor* y = layer.shared_gate == nullptr
                         ? activated(ctx, h.block.activation, up)
                         : gated(ctx, h.block.activation, ggml_mul_mat(ctx, layer.shared_gate, x), up);
    y = ggml_mul_mat(ctx, layer.shared_down, y);
    if (layer.shared_gate_inp == nullptr) return y;
    return ggml_mul(ctx, y, ggml_sigmoid(ctx, ggml_mul_mat(ctx, layer.shared_gate_inp, x)));
}

}  // namespace

int ffn_nodes(const HParams& h) {
    return own_nodes + 2 * h.n_expert_used + (h.block.ffn == Ffn::gated_and_experts ? own_nodes : 0);
}

ggml_tensor* ffn(ggml_context* ctx, ggml_cgraph* nodes, const HParams& h, const LayerWeights& layer, int il,
                 ggml_tensor* x, ggml_tensor* hidden) {
    const BlockDescription& block = h.block;
    if (has_only_experts(block.ffn) && layer.ffn_gate_inp != nullptr) {
        ggml_tensor* const read = layer.experts_in == nullptr ? x : ggml_mul_mat(ctx, layer.experts_in, x);
        ggml_tensor* chosen = experts(ctx, nodes, h, layer, read, x);
        if (layer.experts_out != nullptr) chosen = ggml_mul_mat(ctx, layer.experts_out, chosen);
        return layer.shared_up == nullptr ? chosen : ggml_add(ctx, chosen, shared_expert(ctx, h, layer, x));
    }
    if (block.ffn == Ffn::gated_and_experts) return dense_and_experts(ctx, nodes, h, layer, x, hidden);
    ggml_tensor* y = linear(ctx, layer.ffn_up, layer.ffn_up_bias, x);
    if (block.activation == Activation::xielu) {
        const Xielu& of = block.xielu[static_cast<size_t>(il)];
        y = ggml_xielu(ctx, y, of.alpha_n, of.alpha_p, of.beta, of.eps);
    } else if (block.ffn == Ffn::plain) {
        y = activated(ctx, block.activation, y);
    } else {
        ggml_tensor* const gate =
            layer.ffn_gate == nullptr ? nullptr : linear(ctx, layer.ffn_gate, layer.ffn_gate_bias, x);
        y = gated(ctx, block.activation, gate, y);
    }
    return linear(ctx, layer.ffn_down, layer.ffn_down_bias, y);
}

}  // namespace lkv
