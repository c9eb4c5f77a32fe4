// A layer's weights: tensors of the file, and what kernels read of them in f32.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "cache/spec/cache_spec.h"
#include "decoder/hparams.h"
#include "ggml.h"
#include "model/file_tensors.h"
#include "model/mla_weights.h"
#include "model/recurrent/delta_net_weights.h"
#include "model/recurrent/mamba2_weights.h"
#include "model/recurrent/short_conv_weights.h"

namespace lkv {

// Null where the file has no such tensor. Shapes are ne, as in docs/gguf.md.
struct LayerWeights {
    ggml_tensor* attn_norm = nullptr;  // [n_embd]; null: the branch reads the hidden state as it is
    ggml_tensor* attn_norm_bias = nullptr;
    ggml_tensor* attn_norm_2 = nullptr;  // second input norm: attention reads it, FFN reads attn_norm
    ggml_tensor* attn_norm_2_bias = nullptr;
    // [n_embd, n_head·head_dim]; with an output gate [n_embd, 2·n_head·head_dim], per head Q and then the gate
    ggml_tensor* attn_q = nullptr;
    ggml_tensor* attn_q_bias = nullptr;
    ggml_tensor* attn_k = nullptr;  // [n_embd, w]
    ggml_tensor* attn_k_bias = nullptr;
    ggml_tensor* attn_v = nullptr;
    ggml_tensor* attn_v_bias = nullptr;
    bool value_of_key = false;        // V is what attn_k makes, before anything is done to K
    ggml_tensor* attn_qkv = nullptr;  // [n_embd, n_head·head_dim + 2w], instead of the three
    ggml_tensor* attn_qkv_bias = nullptr;
    ggml_tensor* attn_q_norm = nullptr;  // [head_dim], for each head
    ggml_tensor* attn_k_norm = nullptr;
    ggml_tensor* attn_q_norm_whole = nullptr;  // [n_head·head_dim], whole norm, instead
    ggml_tensor* attn_k_norm_whole = nullptr;  // [w]
    ggml_tensor* attn_sinks = nullptr;         // [n_head], sink logits
    ggml_tensor* attn_output = nullptr;        // [n_head·head_dim, n_embd]
    ggml_tensor* attn_output_bias = nullptr;
    ggml_tensor* attn_gate = nullptr;       // [n_embd, n_head] or [n_embd, n_head·head_dim], block.gate
    ggml_tensor* attn_post_norm = nullptr;  // [n_embd], norm of the branch's output

    ggml_tensor* attn_k_a = nullptr;  // [n_embd, Σ rank_k]
    ggml_tensor* attn_k_a_bias = nullptr;
    ggml_tensor* attn_k_b = nullptr;       // [rank_k max, w]
    ggml_tensor* attn_k_e = nullptr;       // [group·head_dim, Σ rank_k]
    ggml_tensor* attn_k_e_bias = nullptr;  // [w], added to the projection's output
    ggml_tensor* attn_q_e = nullptr;       // [head_dim, rank_k max, n_kv]
    ggml_tensor* attn_v_a = nullptr;
    ggml_tensor* attn_v_a_bias = nullptr;
    ggml_tensor* attn_v_e = nullptr;  // [group·head_dim, Σ rank_v]
    ggml_tensor* attn_v_e_bias = nullptr;
    ggml_tensor* attn_v_b = nullptr;  // [rank_v max, w]

    MlaWeights mla;  // in place of Q, K and V and their factors, but for attn_v_e
    // In place of all those but the norms, in a layer that is recurrent.
    std::optional<std::variant<DeltaNetWeights, Mamba2Weights, ShortConvWeights>> recurrent;

    ggml_tensor* ffn_norm = nullptr;  // absent in parallel blocks, or as attn_norm
    ggml_tensor* ffn_norm_bias = nullptr;
    ggml_tensor* ffn_gate_inp = nullptr;  // [n_embd, n_expert], the router of experts
    ggml_tensor* ffn_gate_inp_bias = nullptr;
    ggml_tensor* experts_in = nullptr;   // [n_embd, n_embd_expert], where experts read less than the hidden state
    ggml_tensor* experts_out = nullptr;  // [n_embd_expert, n_embd], of their weighted sum
    ggml_tensor* expert_bias = nullptr;  // [n_expert], added to scores before experts are chosen, not to weights
    // [n_embd, n_ff], with experts [n_embd, n_ff, n_expert]; absent in a gated FFN: ffn_up holds [gate | up]
    ggml_tensor* ffn_gate = nullptr;
    ggml_tensor* ffn_gate_bias = nullptr;
    ggml_tensor* ffn_up = nullptr;
    ggml_tensor* ffn_up_bias = nullptr;
    ggml_tensor* ffn_down = nullptr;
    ggml_tensor* ffn_down_bias = nullptr;
    ggml_tensor* ffn_post_norm = nullptr;
    // A gated FFN beside experts, whose tensors are those above; each has norms of its own.
    ggml_tensor* dense_gate = nullptr;  // [n_embd, n_ff_dense], reads ffn_norm
    ggml_tensor* dense_up = nullptr;
    ggml_tensor* dense_down = nullptr;
    ggml_tensor* dense_post_norm = nullptr;  // [n_embd]
    ggml_tensor* experts_norm = nullptr;     // [n_embd], what experts read
    ggml_tensor* experts_post_norm = nullptr;
    ggml_tensor* router_scale = nullptr;  // [n_embd], factor of what the router reads
    ggml_tensor* expert_scale = nullptr;  // [n_expert], factor of an expert's output
    // What a token brings to the layer, after the FFN.
    ggml_tensor* token_gate = nullptr;    // [n_embd, n_embd_layer]
    ggml_tensor* token_proj = nullptr;    // [n_embd_layer, n_embd]
    ggml_tensor* token_norm = nullptr;    // [n_embd]
    ggml_tensor* output_scale = nullptr;  // [1], factor of the layer's output
    // The expert of every token, beside those that are chosen; absent: there is none.
    ggml_tensor* shared_gate_inp = nullptr;  // [n_embd]: sigmoid(gate_inp · x) scales its output; null: nothing does
    ggml_tensor* shared_gate = nullptr;      // [n_embd, n_ff_shared]
    ggml_tensor* shared_up = nullptr;
    ggml_tensor* shared_down = nullptr;  // [n_ff_shared, n_embd]

    // What the kernels read (ops/latent_attn.h), f32: up-projections by latent channel, small vectors.
    std::vector<float> k_b;     // [n_kv, rank_k max, head_dim]; rotated and absorbed: E_q, where a GPU expands keys
    std::vector<float> v_b;     // [n_kv, rank_v max, head_dim]
    std::vector<float> k_bias;  // [n_kv, head_dim], rebuild only
    std::vector<float> k_norm;  // [head_dim], rebuild only
    std::vector<float> sinks;   // [n_head], where the file has them
    // [n_kv, head_dim], less the bias that is added to all attention to latents of V: sinks have none. Else empty.
    std::vector<float> sink_values;
};

// What makes the input of a layer that guesses, of a token and the hidden state before it (model/mtp.h).
struct MtpWeights {
    ggml_tensor* token_norm = nullptr;  // [n_embd]
    ggml_tensor* state_norm = nullptr;  // [n_embd]
    ggml_tensor* input = nullptr;       // [2·n_embd, n_embd], of both, normed, the token first
};

// Errors: Error for a tensor that is missing, of another shape or of a type that ggml cannot compute with.
LayerWeights load_layer(const FileTensors& tensors, const HParams& hparams, const LayerCacheSpec& spec, int il);

// Bytes of A, B, E and their biases.
size_t factor_bytes(const LayerWeights& weights);

}  // namespace lkv
