#include "devices/layer_runs.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"

namespace lkv {
namespace {

void check_options(const GpuOptions& asked, int n_gpus) {
    const auto& shares = asked.tensor_split;
    const bool none = asked.split_mode == SplitMode::none;
    if (asked.n_gpu_layers == 0 && (!shares.empty() || asked.main_gpu != 0)) {
        fail(shares.empty() ? "main_gpu" : "tensor_split",
             "expected layers on a GPU beside it, -ngl / n_gpu_layers; got none");
    }
    if (none && !shares.empty()) {
        fail("tensor_split", "expected split mode layer beside it; got none, where one GPU has all layers");
    }
    if (!none && asked.main_gpu != 0) {
        fail("main_gpu", "expected split mode none beside it, as with layer every GPU has a share; got ",
             asked.main_gpu, "; use --split-mode none, or --tensor-split");
    }
    if (asked.main_gpu < 0 || (asked.main_gpu > 0 && asked.main_gpu >= n_gpus)) {
        fail("main_gpu", "expected one of ", n_gpus, " GPUs, counted from 0; got ", asked.main_gpu);
    }
    if (shares.size() > static_cast<size_t>(n_gpus)) {
        fail("tensor_split", "expected at most ", n_gpus, " shares, one for each GPU; got ", shares.size());
    }
    for (const float share : shares) {
        if (!(share >= 0.0F) || !std::isfinite(share)) {
            fail("tensor_split", "expected shares of 0 or more; got ", share);
        }
    }
    if (!shares.empty() && std::all_of(shares.begin(), shares.end(), [](float share) { return share == 0.0F; })) {
        fail("tensor_split", "expected a share above 0; got none");
    }
}

// For every GPU: the sum of its share and of those before it, as a part of 1.
std::vector<double> borders(const GpuOptions& asked, int n_gpus, const std::function<size_t(int)>& free) {
    std::vector<double> shares(static_cast<size_t>(n_gpus), 0.0);
    if (asked.split_mode == SplitMode::none) {
        shares[static_cast<size_t>(asked.main_gpu)] = 1.0;
    } else if (!asked.tensor_split.empty()) {
        std::copy(asked.tensor_split.begin(), asked.tensor_split.end(), shares.begin());
    } else if (n_gpus == 1) {
        shares[0] = 1.0;
    } else {
        for (int gpu = 0; gpu < n_gpus; gpu++) shares[static_cast<size_t>(gpu)] = static_cast<double>(free(gpu));
    }
    std::partial_sum(shares.begin(), shares.end(), shares.begin());
    const double all = shares.back();
    if (all <= 0.0) fail("gpu", "expected a GPU with free memory; got none; use --tensor-split, or -ngl 0");
    for (double& border : shares) border /= all;
    return shares;
}

}  // namespace

SplitMode parse_split_mode(const std::string& word) {
    if (word == "none") return SplitMode::none;
    if (word == "layer") return SplitMode::layer;
    fail("split_mode", "expected none or layer, as a layer has one device; got ", quoted(word));
}

std::vector<LayerRun> place_layers(int n_layer, const GpuOptions& asked, int n_gpus,
                                   const std::function<size_t(int)>& free) {
    check_options(asked, n_gpus);
    const int wanted = asked.n_gpu_layers < 0 ? n_layer : std::min(n_layer, asked.n_gpu_layers);
    const int n_on_gpus = n_gpus == 0 ? 0 : wanted;
    const int n_host = n_layer - n_on_gpus;
    std::vector<LayerRun> runs;
    if (n_host > 0) runs.push_back({-1, 0, n_host});
    if (n_on_gpus == 0) return runs;
    const std::vector<double> ends = borders(asked, n_gpus, free);
    for (int il = n_host; il < n_layer; il++) {
        // as llama.cpp: a layer belongs to the first GPU whose share reaches beyond its beginning
        const double at = static_cast<double>(il - n_host) / n_on_gpus;
        const auto gpu = static_cast<int>(std::upper_bound(ends.begin(), ends.end() - 1, at) - ends.begin());
        if (runs.empty() || runs.back().gpu != gpu) runs.push_back({gpu, il, il});
        runs.back().end_layer = il + 1;
    }
    return runs;
}

std::string runs_text(const std::vector<LayerRun>& runs) {
    std::string text;
    for (const LayerRun& run : runs) {
        text += text.empty() ? "layers " : ", ";
        text += concat(run.first_layer, " to ", run.end_layer - 1, " on ",
                       run.on_gpu() ? concat("GPU ", run.gpu) : std::string("the CPU"));
    }
    return text;
}

}  // namespace lkv
