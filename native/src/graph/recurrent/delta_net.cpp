#include "graph/recurrent/delta_net.h"

#include <array>
#include <cmath>

#include "graph/recurrent/state_tensors.h"
#include "ops/delta_net.h"

namespace lkv {

void gpu_delta_net_node(ggml_tensor*, int, int, void*) { GGML_ABORT("[gpu] expected this node on the GPU's executor"); }

DeltaNetBranch::Inputs DeltaNetBranch::inputs(ggml_tensor* x, const DeltaNetWeights& w) const {
    if (w.packed != nullptr) return unpacked(ops_.linear(x, w.packed, nullptr));
    return {ops_.linear(x, w.qkv, nullptr), ops_.linear(x, w.gate, nullptr)};
}

DeltaNetBranch::Inputs DeltaNetBranch::unpacked(ggml_tensor* all) const {
    const int64_t n_k = sizes_.n_k_heads;
    const int64_t of_v = sizes_.value_width() / n_k;  // channels of V beside a K head
    const size_t stride = static_cast<size_t>(all->ne[0] / n_k) * sizeof(float);
    const auto cut = [&](int64_t first, int64_t width) {
        ggml_tensor* const part = ggml_view_3d(ctx_, all, width, n_k, all->ne[1], stride, all->nb[1],
                                               static_cast<size_t>(first) * sizeof(float));
        return ggml_cont_2d(ctx_, part, width * n_k, all->ne[1]);
    };
    const int64_t hd = sizes_.head_dim;
    ggml_tensor* const qk = ggml_concat(ctx_, cut(0, hd), cut(hd, hd), 0);
    return {ggml_concat(ctx_, qk, cut(2 * hd, of_v), 0), cut(2 * hd + of_v, of_v)};
}

DeltaNetBranch::Gates DeltaNetBranch::gates(ggml_tensor* x, const DeltaNetWeights& w) const {
    const int64_t n_v = sizes_.n_v_heads;
    const int64_t n_tokens = x->ne[1];
    ggml_tensor* beta = nullptr;  // both [n_v, n_tokens]
    ggml_tensor* alpha = nullptr;
    if (w.beta_alpha == nullptr) {
        beta = ops_.linear(x, w.beta, nullptr);
        alpha = ops_.linear(x, w.alpha, nullptr);
    } else {
        ggml_tensor* const both = ops_.linear(x, w.beta_alpha, nullptr);
        const int64_t of_k = n_v / sizes_.n_k_heads;  // V heads of a K head
        const size_t stride = 2 * static_cast<size_t>(of_k) * sizeof(float);
        const auto cut = [&](size_t first) {
            ggml_tensor* const view =
                ggml_view_3d(ctx_, both, of_k, sizes_.n_k_heads, n_tokens, stride, both->nb[1], first * sizeof(float));
            return ggml_cont_2d(ctx_, view, n_v, n_tokens);
        };
        beta = cut(0);
        alpha = cut(static_cast<size_t>(of_k));
    }
    ggml_tensor* const step = ggml_softplus(ctx_, ggml_add(ctx_, alpha, w.decay_bias));
    const auto shaped = [&](ggml_tensor* t) { return ggml_reshape_4d(ctx_, t, 1, n_v, n_each_, n_seqs_); };
    return {shaped(ggml_mul(ctx_, step, w.decay)), shaped(ggml_sigmoid(ctx_, beta))};
}

ggml_tensor* DeltaNetBranch::heads(ggml_tensor* qkv, int64_t first, int64_t n_heads) const {
    const size_t head_bytes = static_cast<size_t>(sizes_.head_dim) * sizeof(float);
    return ggml_view_4d(ctx_, qkv, sizes_.head_dim, n_heads, n_each_, n_seqs_, head_bytes, qkv->nb[1], qkv->nb[2],
                        static_cast<size_t>(first) * sizeof(float));
}

ggml_tensor* DeltaNetBranch::unit_heads(ggml_tensor* qkv, int64_t first, const DeltaNetWeights& w) const {
    const int64_t n_k = sizes_.n_k_heads;
    const int64_t of_k = sizes_.n_v_heads / n_k;
    const auto hd = static_cast<float>(sizes_.head_dim);
    ggml_tensor* const even = ggml_rms_norm(ctx_, heads(qkv, first, n_k), delta_net_length_eps / hd);
    ggml_tensor* const x = ggml_scale(ctx_, even, 1.0f / std::sqrt(hd));
    if (w.beta_alpha == nullptr || of_k == 1) return x;
    // the op gives V head h the K head h modulo n_k; here V heads of one K head follow each other
    ggml_tensor* const flat = ggml_reshape_3d(ctx_, x, sizes_.head_dim, 1, n_k * n_each_ * n_seqs_);
    ggml_tensor* const each = ggml_repeat_4d(ctx_, flat, sizes_.head_dim, of_k, flat->ne[2], 1);
    return ggml_reshape_4d(ctx_, each, sizes_.head_dim, sizes_.n_v_heads, n_each_, n_seqs_);
}

ggml_tensor* DeltaNetBranch::recur(ggml_tensor* qkv, const Gates& gates, const DeltaNetWeights& w, int il) {
    const int64_t hd = sizes_.head_dim;
    const int64_t n_v = sizes_.n_v_heads;
    ggml_tensor* const states = from_.states->matrices(il);
    ggml_tensor* const before =
        ggml_reshape_4d(ctx_, ggml_get_rows(ctx_, states, graph_.states_from), hd, hd, n_v, n_seqs_);
    ggml_tensor* const q = unit_heads(qkv, 0, w);
    ggml_tensor* const k = unit_heads(qkv, sizes_.key_width(), w);
    ggml_tensor* const v = heads(qkv, 2 * sizes_.key_width(), n_v);
    // the outputs, and after them the matrices after the last token, then those after the one before it, …
    ggml_tensor* const both = ggml_gated_delta_net(ctx_, q, k, v, gates.decay, gates.beta, before, n_states_);
    const size_t head_bytes = static_cast<size_t>(hd) * sizeof(float);
    const size_t token_bytes = head_bytes * static_cast<size_t>(n_v);
    const size_t all_bytes = token_bytes * static_cast<size_t>(n_each_ * n_seqs_);
    ggml_tensor* const matrices = ggml_view_2d(ctx_, both, sizes_.matrix_floats(), n_seqs_ * n_states_,
                                               static_cast<size_t>(sizes_.matrix_floats()) * sizeof(float), all_bytes);
    store(states, matrices, graph_.states_to);
    return ggml_view_4d(ctx_, both, hd, n_v, n_each_, n_seqs_, head_bytes, token_bytes,
                        token_bytes * static_cast<size_t>(n_each_), 0);
}

bool DeltaNetBranch::is_step() const {
    return from_.shape.on_gpu && delta_net_takes(sizes_.head_dim, sizes_.d_conv, n_each_);
}

ggml_tensor* DeltaNetBranch::step(ggml_tensor* x, const DeltaNetWeights& w, int il) {
    std::vector<ggml_tensor*> made;
    const std::vector<ggml_tensor*> weights = w.inputs();
    ggml_tensor* const merged = w.merged == nullptr ? nullptr : ops_.linear(x, w.merged, nullptr);
    int64_t first = 0;
    for (size_t i = 0; i < weights.size(); i++) {
        const int64_t width = weights[i]->ne[1];
        if (merged == nullptr || i < w.n_apart) {
            made.push_back(ops_.linear(x, weights[i], nullptr));
        } else {
            const size_t offset = static_cast<size_t>(first) * sizeof(float);
            made.push_back(ggml_view_2d(ctx_, merged, width, x->ne[1], merged->nb[1], offset));
            first += width;
        }
    }
    if (w.packed != nullptr) {
        const Inputs in = unpacked(made.front());
        made.front() = in.gate;
        made.insert(made.begin(), in.qkv);
    }
    graph_.delta_nets.resize(static_cast<size_t>(h_.n_layer));
    DeltaNetNode& node = graph_.delta_nets[static_cast<size_t>(il)];
    node = {&sizes_,
            &w,
            from_.states->conv(il),
            from_.states->matrices(il),
            static_cast<int>(n_seqs_),
            static_cast<int>(n_each_),
            static_cast<int>(n_states_),
            h_.norm_eps};
    std::array args = {made[0], made[1], made[2], made.back(), graph_.states_from, graph_.states_to};
    ggml_tensor* const result = ggml_custom_4d(ctx_, GGML_TYPE_F32, sizes_.value_width(), x->ne[1], 1, 1, args.data(),
                                               static_cast<int>(args.size()), gpu_delta_net_node, 1, &node);
    ggml_build_forward_expand(graph_.nodes, result);  // it writes states, whoever reads what it makes
    return result;
}

ggml_tensor* DeltaNetBranch::build(ggml_tensor* x, int il) {
    const auto& w = std::get<DeltaNetWeights>(*from_.model.layers()[static_cast<size_t>(il)].recurrent);
    if (is_step()) return ops_.linear(step(x, w, il), w.output, nullptr);
    const Inputs in = inputs(x, w);
    ggml_tensor* const now = ggml_reshape_3d(ctx_, in.qkv, sizes_.channels(), n_each_, n_seqs_);
    ggml_tensor* const qkv = ggml_silu(ctx_, convolved(now, w.conv, il));  // [channels, n_each, n_seqs]
    ggml_tensor* const gate = ggml_silu(ctx_, in.gate);
    ggml_tensor* out = recur(qkv, gates(x, w), w, il);
    out = ops_.norm(out, w.norm, nullptr);
    out = ggml_mul(ctx_, out, ggml_reshape_4d(ctx_, gate, sizes_.head_dim, sizes_.n_v_heads, n_each_, n_seqs_));
    return ops_.linear(ggml_reshape_2d(ctx_, out, sizes_.value_width(), x->ne[1]), w.output, nullptr);
}

}  // namespace lkv
