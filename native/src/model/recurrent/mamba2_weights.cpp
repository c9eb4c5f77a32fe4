#include "model/recurrent/mamba2_weights.h"

#include "base/error.h"

namespace lkv {

Mamba2Weights load_recurrent(const FileTensors& tensors, const Mamba2Sizes& sizes, int n_embd, const std::string& blk) {
    const int64_t inner = sizes.inner();
    Mamba2Weights w;
    w.input = tensors.need(blk + "ssm_in.weight", {n_embd, inner + sizes.channels() + sizes.n_heads});
    w.conv = tensors.need(blk + "ssm_conv1d.weight", {sizes.d_conv, sizes.channels()});
    w.conv_bias = tensors.optional(blk + "ssm_conv1d.bias", {sizes.channels()});
    w.decay = tensors.need(blk + "ssm_a", {1, sizes.n_heads});
    w.step_bias = tensors.need(blk + "ssm_dt.bias", {sizes.n_heads});
    w.passed = tensors.need(blk + "ssm_d", {1, sizes.n_heads});
    w.norm = tensors.need(blk + "ssm_norm.weight", {inner / sizes.n_groups, sizes.n_groups});
    w.output = tensors.need(blk + "ssm_out.weight", {inner, n_embd});
    for (const ggml_tensor* t : {w.conv, w.decay, w.passed, w.norm}) {
        if (t->type != GGML_TYPE_F32) fail("gguf", "expected ", t->name, " in f32; got ", ggml_type_name(t->type));
    }
    return w;
}

}  // namespace lkv
