#include "graph/recurrent/mamba2.h"

#include "graph/recurrent/state_tensors.h"

namespace lkv {

ggml_tensor* Mamba2Branch::cut(ggml_tensor* x, int64_t first, int64_t n) const {
    return ggml_view_3d(ctx_, x, n, n_each_, n_seqs_, x->nb[1], x->nb[1] * static_cast<size_t>(n_each_),
                        static_cast<size_t>(first) * sizeof(float));
}

ggml_tensor* Mamba2Branch::parts(ggml_tensor* x, int64_t first, int64_t width, int64_t n) const {
    return ggml_view_4d(ctx_, x, width, n, n_each_, n_seqs_, static_cast<size_t>(width) * sizeof(float), x->nb[1],
                        x->nb[2], static_cast<size_t>(first) * sizeof(float));
}

ggml_tensor* Mamba2Branch::recur(ggml_tensor* mixed, ggml_tensor* step, const Mamba2Weights& w, int il) {
    const int64_t hd = sizes_.head_dim;
    const int64_t n_heads = sizes_.n_heads;
    ggml_tensor* const states = from_.states->matrices(il);
    ggml_tensor* const before = ggml_reshape_4d(ctx_, states, sizes_.d_state, hd, n_heads, states->ne[1]);
    ggml_tensor* const x = parts(mixed, 0, hd, n_heads);
    ggml_tensor* const writes = parts(mixed, sizes_.inner(), sizes_.d_state, sizes_.n_groups);
    ggml_tensor* const reads = parts(mixed, sizes_.inner() + sizes_.shared(), sizes_.d_state, sizes_.n_groups);
    // the outputs, and after them the states after the last token, then those after the one before it, …
    ggml_tensor* const both =
        ggml_ssm_scan(ctx_, before, x, step, w.decay, writes, reads, graph_.states_from, n_states_);
    const auto row = static_cast<size_t>(sizes_.inner()) * sizeof(float);
    ggml_tensor* const after = ggml_view_2d(ctx_, both, sizes_.matrix_floats(), n_seqs_ * n_states_,
                                            static_cast<size_t>(sizes_.matrix_floats()) * sizeof(float),
                                            row * static_cast<size_t>(n_each_ * n_seqs_));
    store(states, after, graph_.states_to);
    ggml_tensor* const y =
        ggml_view_4d(ctx_, both, hd, n_heads, n_each_, n_seqs_, static_cast<size_t>(hd) * sizeof(float), row,
                     row * static_cast<size_t>(n_each_), 0);
    return ggml_add(ctx_, y, ggml_mul(ctx_, x, w.passed));
}

ggml_tensor* Mamba2Branch::build(ggml_tensor* x, int il) {
    const auto& w = std::get<Mamba2Weights>(*from_.model.layers()[static_cast<size_t>(il)].recurrent);
    const int64_t inner = sizes_.inner();
    ggml_tensor* const in = ops_.linear(x, w.input, nullptr);
    ggml_tensor* const made = convolved(cut(in, inner, sizes_.channels()), w.conv, il);
    ggml_tensor* const mixed = ggml_silu(ctx_, w.conv_bias == nullptr ? made : ggml_add(ctx_, made, w.conv_bias));
    ggml_tensor* const steps = ggml_cont(ctx_, cut(in, inner + sizes_.channels(), sizes_.n_heads));
    ggml_tensor* const y = recur(mixed, ggml_add(ctx_, steps, w.step_bias), w, il);
    ggml_tensor* const gate = ggml_cont(ctx_, cut(in, 0, inner));
    const int64_t of_group = inner / sizes_.n_groups;
    const auto grouped = [&](ggml_tensor* t) {
        return ggml_reshape_3d(ctx_, t, of_group, sizes_.n_groups, n_each_ * n_seqs_);
    };
    ggml_tensor* const out = ops_.norm(ggml_swiglu_split(ctx_, grouped(gate), grouped(y)), w.norm, nullptr);
    return ops_.linear(ggml_reshape_2d(ctx_, out, inner, n_each_ * n_seqs_), w.output, nullptr);
}

}  // namespace lkv
