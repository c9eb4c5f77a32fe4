// Steps that several branches of the decoder block take, in stock ggml ops.
#pragma once

#include "decoder/hparams.h"
#include "ggml.h"

namespace lkv {

class LayerOps {
public:
    // holds, keeps: tensors that held() or kept() is given keep their memory until the graph has run.
    LayerOps(ggml_context* ctx, const HParams& hparams, bool holds, bool keeps)
        : ctx_(ctx), h_(hparams), holds_(holds), keeps_(keeps) {}

    ggml_context* context() const { return ctx_; }

    // weight: null where the norm has none.
    ggml_tensor* norm(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias) const;
    // The norm of a branch's output.
    ggml_tensor* post_norm(ggml_tensor* x, ggml_tensor* weight) const;
    ggml_tensor* linear(ggml_tensor* x, ggml_tensor* weight, ggml_tensor* bias) const;
    ggml_tensor* scaled(ggml_tensor* x, float by) const { return by == 1.0F ? x : ggml_scale(ctx_, x, by); }
    // Clips a projection, if the file asks for it.
    ggml_tensor* clamp(ggml_tensor* x) const;
    // x times a Hadamard matrix [b, b], b channels at a time; null: x.
    ggml_tensor* rotate(ggml_tensor* x, ggml_tensor* hadamard) const;
    // The tensors that lead to K, V and Q keep their memory: a GPU computes them concurrently, so none may overwrite another.
    ggml_tensor* held(ggml_tensor* x) const;
    // Queries that a GPU's own product reads, in steps of more tokens too.
    void kept(ggml_tensor* x) const;
    // [.., n_tokens] as one row a token.
    ggml_tensor* as_rows(ggml_tensor* x, int64_t n_tokens) const;

private:
    ggml_tensor* unit(ggml_tensor* x, float eps) const;

    ggml_context* ctx_;
    const HParams& h_;
    bool holds_;
    bool keeps_;
};

}  // namespace lkv
