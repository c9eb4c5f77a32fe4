// Multi-head latent attention as attention of one KV head: queries are taken to the cached latent, and what they read of it to values.
#include "graph/encode.h"
#include "graph/projections.h"

namespace lkv {

Heads Projections::mla_heads(ggml_tensor* x, const LayerWeights& layer, const LayerCacheSpec& spec, int il) const {
    const MlaWeights& w = layer.mla;
    const MlaSizes& sizes = h_.mla;
    const int64_t n_tokens = x->ne[1];
    // channels `first` and on of every vector of `of`, as many as n
    const auto cut = [&](ggml_tensor* of, int64_t n, int64_t first) {
        return ggml_cont(ctx_, ggml_view_3d(ctx_, of, n, of->ne[1], n_tokens, of->nb[1], of->nb[2],
                                            static_cast<size_t>(first) * sizeof(float)));
    };
    ggml_tensor* q = w.q != nullptr
                         ? ops_.linear(x, w.q, nullptr)
                         : ops_.linear(ops_.norm(ops_.linear(x, w.q_a, nullptr), w.q_a_norm, nullptr), w.q_b, nullptr);
    q = ggml_reshape_3d(ctx_, q, sizes.query(), h_.n_head, n_tokens);
    ggml_tensor* const q_rot = rope(cut(q, sizes.n_rot, sizes.n_key), il);
    ggml_tensor* const q_key = swapped(ctx_, cut(q, sizes.n_key, 0));  // [n_key, n_tokens, n_head]
    ggml_tensor* const absorbed = swapped(ctx_, ggml_mul_mat(ctx_, w.k_b, q_key));

    ggml_tensor* const row = ggml_reshape_3d(ctx_, ops_.linear(x, w.kv_a, nullptr), sizes.row(), 1, n_tokens);
    ggml_tensor* const k_rot = rope(cut(row, sizes.n_rot, sizes.kv_rank), il);
    ggml_tensor* latent = ops_.norm(cut(row, sizes.kv_rank, 0), w.kv_a_norm, nullptr);
    if (spec.v_path == VPath::latent) latent = ops_.linear(latent, layer.attn_v_e, nullptr);
    Heads found;
    found.q = ggml_concat(ctx_, q_rot, absorbed, 0);
    found.v = ggml_concat(ctx_, k_rot, latent, 0);
    return found;
}

ggml_tensor* Projections::mla_values(ggml_tensor* x, const LayerWeights& layer) const {
    ggml_tensor* const values = ggml_mul_mat(ctx_, layer.mla.v_b, swapped(ctx_, x));  // [n_value, n_tokens, n_head]
    return swapped(ctx_, values);
}

}  // namespace lkv
