// The weights of a Mamba-2 layer, under llama.cpp's names.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "decoder/mamba2.h"
#include "ggml.h"
#include "model/file_tensors.h"

namespace lkv {

// Shapes are ne.
struct Mamba2Weights {
    // ssm_in [n_embd, 2 inner + 2 shared + n_heads]: the gate of the output, what is convolved (a head's input, then what groups write
    // and read), and a step for every head
    ggml_tensor* input = nullptr;
    ggml_tensor* conv = nullptr;       // ssm_conv1d [d_conv, channels], f32
    ggml_tensor* conv_bias = nullptr;  // [channels], null: none
    ggml_tensor* decay = nullptr;      // ssm_a [1, n_heads], -exp(A_log)
    ggml_tensor* step_bias = nullptr;  // ssm_dt.bias [n_heads]
    ggml_tensor* passed = nullptr;     // ssm_d [1, n_heads]: how much of its input a head gives out as it is
    ggml_tensor* norm = nullptr;       // ssm_norm [inner / n_groups, n_groups], of each group's output
    ggml_tensor* output = nullptr;     // ssm_out [inner, n_embd]

    std::vector<ggml_tensor*> inputs() const { return {input}; }  // what multiplies the layer's input
    std::array<ggml_tensor*, 2> largest() const { return {input, output}; }
};

// blk: "blk.3.". Errors: Error for a tensor that is missing, of another shape or of a type that ggml cannot compute with.
Mamba2Weights load_recurrent(const FileTensors& tensors, const Mamba2Sizes& sizes, int n_embd, const std::string& blk);

}  // namespace lkv
