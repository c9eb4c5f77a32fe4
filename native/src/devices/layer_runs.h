// Runs of consecutive layers per device: the CPU's run first, then those of the GPUs in their order.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace lkv {

struct LayerRun {
    int gpu = -1;  // -1: the CPU
    int first_layer = 0;
    int end_layer = 0;

    bool on_gpu() const { return gpu >= 0; }
};

enum class SplitMode { none, layer };

// The placement that was requested, in llama.cpp's terms.
struct GpuOptions {
    int n_gpu_layers = 0;             // the last layers and the output; negative or as many as there are: all
    std::vector<float> tensor_split;  // the GPUs' shares of these layers; empty: by free memory
    int main_gpu = 0;                 // with SplitMode::none, the GPU that has all layers
    SplitMode split_mode = SplitMode::layer;
};

// Errors: Error for an unknown word.
SplitMode parse_split_mode(const std::string& word);

// n_gpus: how many GPUs exist. free(gpu): free bytes of a GPU, called if shares depend on it.
// Errors: Error for shares or a GPU that do not exist or would change nothing.
std::vector<LayerRun> place_layers(int n_layer, const GpuOptions& asked, int n_gpus,
                                   const std::function<size_t(int gpu)>& free);

// "layers 0 to 2 on the CPU, 3 to 5 on GPU 0"
std::string runs_text(const std::vector<LayerRun>& runs);

}  // namespace lkv
