#include "graph/recurrent/branch.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "graph/recurrent/delta_net.h"
#include "graph/recurrent/mamba2.h"
#include "graph/recurrent/short_conv.h"
#include "graph/recurrent/state_tensors.h"

namespace lkv {
namespace {

bool gpu_convolves(int d_conv, int64_t channels) {
    constexpr std::array d_convs = {3, 4, 5, 9, 15};
    return std::find(d_convs.begin(), d_convs.end(), d_conv) != d_convs.end() && channels % 128 == 0;
}

std::string convolution(int d_conv, int64_t channels) { return concat(d_conv, " inputs over ", channels, " channels"); }

constexpr const char* gpu_convolutions = "convolutions of 3, 4, 5, 9 or 15 inputs over a multiple of 128 channels";

}  // namespace

std::unique_ptr<RecurrentBranch> recurrent_branch(const GraphSources& from, const LayerOps& ops, Graph& graph) {
    const std::optional<Recurrence>& recurrence = from.model.hparams().recurrence;
    if (!recurrence) return nullptr;
    if (const auto* const sizes = std::get_if<DeltaNetSizes>(&*recurrence)) {
        return std::make_unique<DeltaNetBranch>(*sizes, from, ops, graph);
    }
    if (const auto* const sizes = std::get_if<Mamba2Sizes>(&*recurrence)) {
        return std::make_unique<Mamba2Branch>(*sizes, from, ops, graph);
    }
    return std::make_unique<ShortConvBranch>(from, ops, graph);
}

void check_gpu_takes(const Recurrence& recurrence) {
    if (const auto* const sizes = std::get_if<DeltaNetSizes>(&recurrence)) {
        constexpr std::array head_dims = {16, 32, 64, 128};
        const bool fits = std::find(head_dims.begin(), head_dims.end(), sizes->head_dim) != head_dims.end();
        if (fits && gpu_convolves(sizes->d_conv, sizes->channels())) return;
        fail("gpu", "expected delta nets with heads of 16, 32, 64 or 128 channels, and ", gpu_convolutions,
             "; got heads of ", sizes->head_dim, ", and ", convolution(sizes->d_conv, sizes->channels()),
             "; use -ngl 0");
    }
    if (const auto* const sizes = std::get_if<ShortConvSizes>(&recurrence)) {
        if (gpu_convolves(sizes->d_conv, sizes->n_embd)) return;
        fail("gpu", "expected ", gpu_convolutions, "; got ", convolution(sizes->d_conv, sizes->n_embd), "; use -ngl 0");
    }
    const auto& sizes = std::get<Mamba2Sizes>(recurrence);
    const bool fits = (sizes.d_state == 128 || sizes.d_state == 256) && sizes.head_dim % 16 == 0;
    if (fits && gpu_convolves(sizes.d_conv, sizes.channels())) return;
    fail("gpu", "expected Mamba-2 with states of 128 or 256, heads of a multiple of 16 channels, and ",
         gpu_convolutions, "; got states of ", sizes.d_state, ", heads of ", sizes.head_dim, ", and ",
         convolution(sizes.d_conv, sizes.channels()), "; use -ngl 0");
}

void RecurrentBranch::store(ggml_tensor* states, ggml_tensor* rows, ggml_tensor* to) {
    ggml_build_forward_expand(graph_.nodes, ggml_set_rows(ctx_, states, rows, to));
}

ggml_tensor* RecurrentBranch::convolved(ggml_tensor* now, ggml_tensor* kernels, int il) {
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
    return ggml_ssm_conv(ctx_, inputs, kernels);
}

}  // namespace lkv
