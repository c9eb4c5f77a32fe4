#include "graph/recurrent/short_conv.h"

namespace lkv {

ggml_tensor* ShortConvBranch::build(ggml_tensor* x, int il) {
    const auto& w = std::get<ShortConvWeights>(*from_.model.layers()[static_cast<size_t>(il)].recurrent);
    const int64_t n = h_.n_embd;
    ggml_tensor* const in = ops_.linear(x, w.input, nullptr);
    // a third of [3 n_embd, n_tokens], as [n_embd, n_each, n_seqs]
    const auto third = [&](int64_t which) {
        return ggml_view_3d(ctx_, in, n, n_each_, n_seqs_, in->nb[1], in->nb[1] * static_cast<size_t>(n_each_),
                            static_cast<size_t>(which * n) * sizeof(float));
    };
    ggml_tensor* const mixed = convolved(ggml_mul(ctx_, third(0), third(2)), w.conv, il);
    ggml_tensor* const y = ggml_mul(ctx_, mixed, third(1));
    return ops_.linear(ggml_reshape_2d(ctx_, y, n, n_each_ * n_seqs_), w.output, nullptr);
}

}  // namespace lkv
