#include "graph/encode.h"

#include <algorithm>

namespace lkv {

ggml_tensor* swapped(ggml_context* ctx, ggml_tensor* x) {
    if (x->ne[1] == 1 || x->ne[2] == 1) {
        return ggml_reshape_3d(ctx, x, x->ne[0], x->ne[2], x->ne[1]);
    }
    return ggml_cont(ctx, ggml_permute(ctx, x, 0, 2, 1, 3));
}

ggml_tensor* heads_product(ggml_context* ctx, ggml_tensor* w, ggml_tensor* x, const Held& held,
                           std::vector<FactorProduct>& made) {
    ggml_tensor* const by_head = held(swapped(ctx, x));
    ggml_tensor* const product = held(ggml_mul_mat(ctx, w, by_head));
    ggml_tensor* const result = swapped(ctx, product);
    const bool moves = by_head->op == GGML_OP_CONT && result->op == GGML_OP_CONT;
    made.push_back(moves ? FactorProduct{x, product, result} : FactorProduct{nullptr, product, nullptr});
    return result;
}

ggml_tensor* encode(ggml_context* ctx, ggml_tensor* e, ggml_tensor* x, const TensorSpec& spec, const Held& held,
                    std::vector<FactorProduct>& made) {
    const int64_t n_tokens = x->ne[2];
    const int64_t w = x->ne[0] * x->ne[1];
    const auto n_groups = static_cast<int64_t>(spec.ranks.size());
    const int64_t width = w / n_groups;
    const size_t row_bytes = e->nb[1];
    x = ggml_is_contiguous(x) ? x : ggml_cont(ctx, x);
    if (std::equal(spec.ranks.begin() + 1, spec.ranks.end(), spec.ranks.begin())) {
        const int64_t rank = spec.ranks.front();
        ggml_tensor* const by_rank =
            ggml_view_3d(ctx, e, width, rank, n_groups, row_bytes, static_cast<size_t>(rank) * row_bytes, 0);
        ggml_tensor* const z =
            heads_product(ctx, by_rank, ggml_reshape_3d(ctx, x, width, n_groups, n_tokens), held, made);
        return ggml_reshape_2d(ctx, z, rank * n_groups, n_tokens);
    }
    x = ggml_reshape_2d(ctx, x, w, n_tokens);
    ggml_tensor* z = nullptr;
    size_t row = 0;
    for (size_t g = 0; g < spec.ranks.size(); g++) {
        ggml_tensor* const eg = ggml_view_2d(ctx, e, width, spec.ranks[g], row_bytes, row * row_bytes);
        ggml_tensor* const xg =
            ggml_view_2d(ctx, x, width, n_tokens, x->nb[1], g * static_cast<size_t>(width) * sizeof(float));
        ggml_tensor* const zg = held(ggml_mul_mat(ctx, eg, xg));
        made.push_back({nullptr, zg, nullptr});
        z = z == nullptr ? zg : held(ggml_concat(ctx, z, zg, 0));
        row += static_cast<size_t>(spec.ranks[g]);
    }
    return z;
}

}  // namespace lkv
