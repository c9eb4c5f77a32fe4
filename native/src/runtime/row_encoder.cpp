#include "runtime/row_encoder.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "base/tensor_context.h"
#include "ggml-cpp.h"
#include "graph/encode.h"

namespace lkv {

void GgmlRowEncoder::encode(int layer, bool value_side, std::span<const float> rows, int n, std::span<float> z) {
    const LayerCacheSpec& spec = model_.cache_spec().layers[static_cast<size_t>(layer)];
    const LayerWeights& weights = model_.layers()[static_cast<size_t>(layer)];
    const TensorSpec& side = value_side ? spec.v : spec.k;
    ggml_tensor* const e = value_side ? weights.attn_v_e : weights.attn_k_e;
    if (!side.encoded) {  // a full side beside latents of the other
        std::copy(rows.begin(), rows.end(), z.begin());
        return;
    }
    const HeadShape& heads = model_.hparams().heads_of(layer);
    const size_t n_nodes = 8 + 4 * side.ranks.size();
    const TensorContext context =
        tensor_context(ggml_tensor_overhead() * 2 * n_nodes + ggml_graph_overhead_custom(n_nodes, false));
    ggml_context* const ctx = context.get();
    ggml_tensor* const x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, heads.head_dim, heads.n_kv, n);
    std::vector<FactorProduct> products;
    ggml_tensor* const out = lkv::encode(ctx, e, x, side, [](ggml_tensor* t) { return t; }, products);
    ggml_cgraph* const graph = ggml_new_graph_custom(ctx, n_nodes, false);
    ggml_build_forward_expand(graph, out);
    const ggml_backend_buffer_ptr buffer(quietly([&] { return ggml_backend_alloc_ctx_tensors(ctx, backend_); }));
    if (buffer == nullptr) {
        fail("memory", "expected room for ", n, " tokens that leave the exact window; got none");
    }
    ggml_backend_tensor_set(x, rows.data(), 0, rows.size_bytes());
    if (ggml_backend_graph_compute(backend_, graph) != GGML_STATUS_SUCCESS) {
        fail("compute", "expected latents of ", n, " tokens; got a failure of ggml");
    }
    ggml_backend_tensor_get(out, z.data(), 0, z.size_bytes());
}

}  // namespace lkv
