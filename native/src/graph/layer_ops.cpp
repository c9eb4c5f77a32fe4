#include "graph/layer_ops.h"

namespace lkv {

ggml_tensor* LayerOps::norm(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias) const {
    x = unit(x, h_.norm_eps);
    x = weight == nullptr ? x : ggml_mul(ctx_, x, weight);
    return bias == nullptr ? x : ggml_add(ctx_, x, bias);
}

ggml_tensor* LayerOps::post_norm(ggml_tensor* x, ggml_tensor* weight) const {
    const float eps = h_.block.post_norm_epsilon;
    return ggml_mul(ctx_, unit(x, eps == 0.0F ? h_.norm_eps : eps), weight);
}

ggml_tensor* LayerOps::unit(ggml_tensor* x, float eps) const {
    return h_.block.norm == Norm::rms ? ggml_rms_norm(ctx_, x, eps) : ggml_norm(ctx_, x, eps);
}

ggml_tensor* LayerOps::linear(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias) const {
    x = ggml_mul_mat(ctx_, weight, x);
    return bias == nullptr ? x : ggml_add(ctx_, x, bias);
}

ggml_tensor* LayerOps::rotate(ggml_tensor* x, ggml_tensor* hadamard) const {
    if (hadamard == nullptr) {
        return x;
    }
    const int64_t block = hadamard->ne[0];
    ggml_tensor* const flat =
        ggml_reshape_2d(ctx_, ggml_is_contiguous(x) ? x : ggml_cont(ctx_, x), block, ggml_nelements(x) / block);
    ggml_tensor* const y = ggml_mul_mat(ctx_, hadamard, flat);
    ggml_mul_mat_set_hint(y, GGML_HINT_SRC0_IS_HADAMARD);
    return ggml_reshape_3d(ctx_, y, x->ne[0], x->ne[1], x->ne[2]);
}

ggml_tensor* LayerOps::clamp(ggml_tensor* x) const {
    return h_.clamp_kqv > 0.0F ? ggml_clamp(ctx_, x, -h_.clamp_kqv, h_.clamp_kqv) : x;
}

ggml_tensor* LayerOps::held(ggml_tensor* x) const {
    if (holds_) ggml_set_output(x->view_src != nullptr ? x->view_src : x);
    return x;
}

void LayerOps::kept(ggml_tensor* x) const {
    if (keeps_) ggml_set_output(x->view_src != nullptr ? x->view_src : x);
}

ggml_tensor* LayerOps::as_rows(ggml_tensor* x, int64_t n_tokens) const {
    x = ggml_is_contiguous(x) ? x : ggml_cont(ctx_, x);
    return ggml_reshape_2d(ctx_, x, ggml_nelements(x) / n_tokens, n_tokens);
}

}  // namespace lkv
