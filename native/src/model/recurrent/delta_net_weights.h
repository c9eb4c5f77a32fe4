// The weights of a gated delta net, under llama.cpp's names.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "decoder/delta_net.h"
#include "ggml.h"
#include "model/file_tensors.h"

namespace lkv {

// Shapes are ne. K heads: n_k, V heads: n_v.
struct DeltaNetWeights {
    ggml_tensor* qkv = nullptr;   // attn_qkv [n_embd, channels]: Q, K and V before the convolution
    ggml_tensor* gate = nullptr;  // attn_gate [n_embd, value_width], of the output
    // ssm_in [n_embd, channels + value_width] instead of both, in older files: per K head Q, K, V of its V heads, and their gates
    ggml_tensor* packed = nullptr;
    ggml_tensor* conv = nullptr;        // ssm_conv1d [d_conv, channels], f32
    ggml_tensor* decay = nullptr;       // ssm_a [n_v], -exp(A_log)
    ggml_tensor* decay_bias = nullptr;  // ssm_dt.bias [n_v]
    // How much a head learns of a token and how much it forgets before: ssm_beta and ssm_alpha [n_embd, n_v]. V head h then has the K
    // head h modulo n_k.
    ggml_tensor* beta = nullptr;
    ggml_tensor* alpha = nullptr;
    // ssm_ba [n_embd, 2 n_v] instead of both: per K head the betas and then the alphas of its n_v / n_k V heads, which follow each other.
    ggml_tensor* beta_alpha = nullptr;
    // The last of inputs() as one, where they lie beside each other on a GPU, and how many come before; null: they do not.
    ggml_tensor* merged = nullptr;
    size_t n_apart = 0;
    ggml_tensor* norm = nullptr;    // ssm_norm [head_dim], of each head's output
    ggml_tensor* output = nullptr;  // ssm_out [value_width, n_embd]

    // What multiplies the layer's input, present ones.
    std::vector<ggml_tensor*> inputs() const;
    // The largest weights, null ones among them.
    std::array<ggml_tensor*, 4> largest() const { return {qkv, packed, gate, output}; }
};

// blk: "blk.3.". Errors: Error for a tensor that is missing, of another shape or of a type that ggml cannot compute with.
DeltaNetWeights load_recurrent(const FileTensors& tensors, const DeltaNetSizes& sizes, int n_embd,
                               const std::string& blk);

// Makes `merged` from placed weights that have one type and lie side by side. ctx: where it lives.
void merge_inputs(ggml_context* ctx, DeltaNetWeights& weights);

}  // namespace lkv
