#include "graph/weight_factors.h"

namespace lkv {
namespace {

constexpr size_t nodes_of_one = 5;

ggml_tensor* factor_of(const ggml_tensor* node, const WeightFactors& factors) {
    if (node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID) return nullptr;
    const ggml_tensor* const weight = node->src[0];
    const auto found = factors.find(weight->view_src != nullptr ? weight->view_src : weight);
    return found == factors.end() ? nullptr : found->second;
}

}  // namespace

ggml_tensor* of_chosen(ggml_context* ctx, ggml_tensor* factors, ggml_tensor* chosen) {
    const int64_t n = factors->ne[0];
    ggml_tensor* const every = ggml_repeat_4d(ctx, ggml_reshape_3d(ctx, factors, 1, n, 1), 1, n, chosen->ne[1], 1);
    return ggml_get_rows(ctx, every, chosen);
}

size_t factor_nodes(const WeightFactors& factors) { return nodes_of_one * factors.size(); }

ggml_cgraph* with_factors(ggml_context* ctx, ggml_cgraph* nodes, const WeightFactors& factors, size_t n_nodes,
                          Roles& roles, std::initializer_list<ggml_tensor**> results) {
    ggml_cgraph* const made = ggml_new_graph_custom(ctx, n_nodes, false);
    std::unordered_map<const ggml_tensor*, ggml_tensor*> scaled;
    const auto replace = [&](ggml_tensor*& tensor) {
        if (const auto found = scaled.find(tensor); found != scaled.end()) tensor = found->second;
    };
    std::vector<int> now;  // by the number of a node before
    for (int i = 0; i < ggml_graph_n_nodes(nodes); i++) {
        now.push_back(ggml_graph_n_nodes(made));
        ggml_tensor* const node = ggml_graph_node(nodes, i);
        for (ggml_tensor*& src : node->src) replace(src);
        replace(node->view_src);
        ggml_build_forward_expand(made, node);
        ggml_tensor* const factor = factor_of(node, factors);
        if (factor == nullptr) continue;
        const bool of_experts = node->op == GGML_OP_MUL_MAT_ID;
        ggml_tensor* const with = ggml_mul(ctx, node, of_experts ? of_chosen(ctx, factor, node->src[2]) : factor);
        if ((node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0) ggml_set_output(with);
        ggml_build_forward_expand(made, with);
        scaled[node] = with;
    }
    for (ggml_tensor** const result : results) replace(*result);
    for (LayerRoles& of : roles.layers) {
        for (int* const number :
             {&of.ahead, &of.input, &of.k, &of.v, &of.store, &of.rope, &of.latent_q, &of.attention}) {
            *number = now[static_cast<size_t>(*number)];
        }
    }
    return made;
}

}  // namespace lkv
