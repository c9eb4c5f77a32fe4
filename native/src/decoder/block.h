// The block description (docs/gguf.md): from latentkv.block.* keys, or from the architecture of a stock file.
#pragma once

#include <vector>

#include "gguf/reader.h"
#include "gguf_schema.h"

namespace lkv {

struct HParams;

using schema::Activation;
using schema::Ffn;
using schema::Gate;
using schema::Mixer;
using schema::Norm;
using schema::Position;
using schema::RopePairing;

// What differs between layers: how tokens are mixed, and settings of attention.
struct LayerAttention {
    Mixer mixer = Mixer::attention;
    int window = 0;           // sliding window in tokens, 0 = none
    float rope_base = 0.0F;   // 0: the layer has no RoPE
    bool rope_scaled = true;  // whether the file's scaling and divisors apply
    int rows_of = -1;         // the earlier layer whose K and V this one reads, -1: its own
};

// xIELU of one layer (Huang and Schlag 2024, arXiv 2411.13010), as checkpoints have it: softplus comes later.
struct Xielu {
    float alpha_n;
    float alpha_p;
    float beta;
    float eps;
};

// Experts, but for the first layers, and no FFN beside them.
inline bool has_only_experts(Ffn ffn) { return ffn == Ffn::experts || ffn == Ffn::plain_experts; }

// Its fields that concern all layers are those of the schema (`block_words` and `block_options` there).
struct BlockDescription : schema::Block {
    std::vector<LayerAttention> layers;  // [n_layer]
    std::vector<Xielu> xielu;            // [n_layer] with Activation::xielu
    bool softmax_beside_bias = false;    // scores of experts, where a file names none and has biases of them
};

// Errors: Error for a file without latentkv.block.* keys whose architecture has no stock description.
void check_architecture(const GgufFile& file, const std::string& architecture);

// sizes: the decoder's sizes; their block is not read.
// Errors: Error for an unknown architecture or word, a number out of range, or an array that is not one value a layer.
BlockDescription read_block(const GgufFile& file, const HParams& sizes);

}  // namespace lkv
