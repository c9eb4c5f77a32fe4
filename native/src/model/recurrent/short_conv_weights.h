// The weights of a gated short convolution, under llama.cpp's names.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "decoder/short_conv.h"
#include "ggml.h"
#include "model/file_tensors.h"

namespace lkv {

// Shapes are ne.
struct ShortConvWeights {
    // shortconv.in_proj [n_embd, 3 n_embd]: a gate of the convolution's input, one of its output, and what is convolved
    ggml_tensor* input = nullptr;
    ggml_tensor* conv = nullptr;    // shortconv.conv [d_conv, n_embd], f32
    ggml_tensor* output = nullptr;  // shortconv.out_proj [n_embd, n_embd]

    std::vector<ggml_tensor*> inputs() const { return {input}; }  // what multiplies the layer's input
    std::array<ggml_tensor*, 2> largest() const { return {input, output}; }
};

// blk: "blk.3.". Errors: Error for a tensor that is missing, of another shape or of a type that ggml cannot compute with.
ShortConvWeights load_recurrent(const FileTensors& tensors, const ShortConvSizes& sizes, int n_embd,
                                const std::string& blk);

}  // namespace lkv
