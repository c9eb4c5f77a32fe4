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

struct BlockDescription {
    Norm norm = Norm::rms;
    Activation activation = Activation::silu;
    Ffn ffn = Ffn::gated;
    bool parallel = false;
    Position position = Position::rope;
    RopePairing rope_pairing = RopePairing::norm;
    float embedding_scale = 1.0F;    // factor of token embeddings
    float attention_scale = 0.0F;    // factor of scores, 0 = 1/sqrt(head_dim)
    float attention_softcap = 0.0F;  // c: scores become c · tanh(scores / c), 0 = none
    float residual_scale = 1.0F;     // factor of both branches, before they are added
    bool yarn_truncate = true;       // YaRN's ramp begins and ends at whole planes
    bool expert_norm = true;         // weights of the chosen experts are divided by their sum
    bool value_norm = false;         // V of a head is divided by its root mean square
    bool value_of_key = false;       // V of a layer without attn_v.weight is what attn_k.weight makes
    bool output_gate = false;        // attention's output is multiplied by a sigmoid, which attn_q makes beside Q
    bool norm_after_rope = false;    // heads of Q and K are normed after RoPE, not before
    Gate gate = Gate::none;          // of attention's output, made by attn_gate.weight: of a head, or of each number
    float logit_scale = 1.0F;
    float logit_softcap = 0.0F;          // logits = cap · tanh(logits / cap), 0 = none
    std::vector<LayerAttention> layers;  // [n_layer]
    std::vector<Xielu> xielu;            // [n_layer] with Activation::xielu
};

// Errors: Error for a file without latentkv.block.* keys whose architecture has no stock description.
void check_architecture(const GgufFile& file, const std::string& architecture);

// sizes: the decoder's sizes; their block is not read.
// Errors: Error for an unknown architecture or word, a number out of range, or an array that is not one value a layer.
BlockDescription read_block(const GgufFile& file, const HParams& sizes);

}  // namespace lkv
