#include "graph/recurrent/branch.h"

#include "graph/recurrent/state_tensors.h"

namespace lkv {

void RecurrentBranch::store(ggml_tensor* states, ggml_tensor* rows, ggml_tensor* to) {
    ggml_build_forward_expand(graph_.nodes, ggml_set_rows(ctx_, states, rows, to));
}

ggml_tensor* RecurrentBranch::convolved(ggml_tensor* now, ggml_tensor* kernels, ggml_tensor* bias, int il) {
    ggml_tensor* const states = from_.states->conv(il);
    const int64_t n_before = kernels->ne[0] - 1;
    const int64_t channels = kernels->ne[1];
    ggml_tensor* const before =
        ggml_reshape_3d(ctx_, ggml_get_rows(ctx_, states, graph_.states_from), n_before, channels, n_seqs_);
    // [n_before + n_each, channels, n_seqs]
    ggml_tensor* const inputs = ggml_concat(ctx_, before, ggml_transpose(ctx_, now), 0);
    for (int64_t back = 0; back < n_states_; back++) {
        ggml_tensor* const last = ggml_view_3d(ctx_, inputs, n_before, channels, n_seqs_, inputs->nb[1], inputs->nb[2],
                                               static_cast<size_t>(n_each_ - back) * inputs->nb[0]);
        ggml_tensor* const to = ggml_view_1d(ctx_, graph_.states_to, n_seqs_,
                                             static_cast<size_t>(back * n_seqs_) * graph_.states_to->nb[0]);
        store(states, ggml_reshape_2d(ctx_, ggml_cont(ctx_, last), n_before * channels, n_seqs_), to);
    }
    ggml_tensor* const y = ggml_ssm_conv(ctx_, inputs, kernels);
    return ggml_silu(ctx_, bias == nullptr ? y : ggml_add(ctx_, y, bias));
}

}  // namespace lkv
