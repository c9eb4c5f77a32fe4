#include "model/recurrent/delta_net_weights.h"

#include "base/error.h"

namespace lkv {

DeltaNetWeights load_recurrent(const FileTensors& tensors, const DeltaNetSizes& sizes, int n_embd,
                               const std::string& blk) {
    const int64_t n_v = sizes.n_v_heads;
    DeltaNetWeights w;
    if (tensors.find(blk + "attn_qkv.weight") == nullptr) {
        w.packed = tensors.optional(blk + "ssm_in.weight", {n_embd, sizes.channels() + sizes.value_width()});
    }
    if (w.packed == nullptr) {
        w.qkv = tensors.need(blk + "attn_qkv.weight", {n_embd, sizes.channels()});
        w.gate = tensors.need(blk + "attn_gate.weight", {n_embd, sizes.value_width()});
    }
    w.conv = tensors.need(blk + "ssm_conv1d.weight", {sizes.d_conv, sizes.channels()});
    if (w.conv->type != GGML_TYPE_F32) {
        fail("gguf", "expected ", blk, "ssm_conv1d.weight in f32; got ", ggml_type_name(w.conv->type));
    }
    w.decay = tensors.need(blk + "ssm_a", {n_v});
    w.decay_bias = tensors.need(blk + "ssm_dt.bias", {n_v});
    w.beta_alpha = tensors.optional(blk + "ssm_ba.weight", {n_embd, 2 * n_v});
    if (w.beta_alpha == nullptr) {
        w.beta = tensors.need(blk + "ssm_beta.weight", {n_embd, n_v});
        w.alpha = tensors.need(blk + "ssm_alpha.weight", {n_embd, n_v});
    }
    w.norm = tensors.need(blk + "ssm_norm.weight", {sizes.head_dim});
    w.output = tensors.need(blk + "ssm_out.weight", {sizes.value_width(), n_embd});
    return w;
}

std::vector<ggml_tensor*> DeltaNetWeights::inputs() const {
    std::vector<ggml_tensor*> found = {packed, qkv, gate, beta_alpha, beta, alpha};
    std::erase(found, nullptr);
    return found;
}

void merge_inputs(ggml_context* ctx, DeltaNetWeights& w) {
    const std::vector<ggml_tensor*> all = w.inputs();
    size_t first = all.size();
    int64_t n_out = 0;
    for (; first > 0; first--) {
        const ggml_tensor* const one = all[first - 1];
        const ggml_tensor* const next = first < all.size() ? all[first] : nullptr;
        const bool beside = next == nullptr || (one->type == next->type && one->buffer == next->buffer &&
                                                static_cast<const char*>(one->data) + ggml_nbytes(one) == next->data);
        if (!beside) break;
        n_out += one->ne[1];
    }
    if (all.size() - first < 2) return;
    w.n_apart = first;
    w.merged = ggml_new_tensor_2d(ctx, all[first]->type, all[first]->ne[0], n_out);
    ggml_format_name(w.merged, "%s (merged)", all[first]->name);
    w.merged->data = all[first]->data;
    w.merged->buffer = all[first]->buffer;
}

}  // namespace lkv
