// The decoder's sizes and block description, from the file.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "decoder/block.h"
#include "decoder/mla.h"
#include "decoder/recurrence.h"
#include "decoder/routing.h"
#include "gguf/reader.h"

namespace lkv {

// Heads of a layer.
struct HeadShape {
    int n_kv = 0;  // KV heads
    int head_dim = 0;
    int n_rot = 0;   // rotated dims of a head
    int n_head = 0;  // query heads

    int width() const { return n_kv * head_dim; }
    bool operator==(const HeadShape&) const = default;
};

struct HParams {
    std::string architecture;  // stock name, only used to look up "<architecture>.*" keys
    BlockDescription block;

    int n_layer = 0;
    int n_mtp = 0;              // layers after those, which guess further tokens (model/mtp.h)
    int first_block = 0;        // the number that the file gives to the first layer
    bool reads_states = false;  // tokens come with the hidden state of the one before
    int n_embd = 0;
    int n_ff = 0;            // of one expert, if the model has experts
    std::vector<int> n_ffs;  // of every layer, in models without experts
    int n_embd_layer = 0;    // numbers that a token brings to every layer beside its embedding, 0: none
    int n_ff_dense = 0;      // of the FFN beside experts, if there is one
    int n_expert = 0;        // 0: no experts
    int n_expert_used = 0;   // per token
    int n_embd_expert = 0;   // numbers that an expert reads and writes, n_embd or fewer
    int n_ff_shared = 0;     // of the expert that every token has, where the file has one
    int n_dense_layers = 0;  // first layers without experts, whose FFNs are as wide as n_ffs says
    ExpertRouting routing;
    int n_head = 0;                // the most of a layer
    std::vector<HeadShape> heads;  // [n_layer]
    int n_ctx_train = 0;
    int n_vocab = 0;
    float norm_eps = 1e-5F;

    // Queries grow with their position: times 1 + scale · ln(1 + floor(position / length)). 0: they do not.
    float temperature_scale = 0;
    int temperature_length = 0;

    std::optional<Recurrence> recurrence;  // where some layers are recurrent
    MlaSizes mla;                          // where layers attend to latents that the model has by itself

    float clamp_kqv = 0;  // 0 = none
    float max_alibi_bias = 0;

    const HeadShape& heads_of(int il) const { return heads[static_cast<size_t>(il)]; }
    float temperature(int position) const;
    int width_q(int il) const { return heads_of(il).n_head * heads_of(il).head_dim; }
    bool has_mla() const { return mla.kv_rank > 0; }
    // The layer whose K and V a layer reads, and whether it makes these itself.
    int rows_of(int il) const {
        const int from = block.layers.empty() ? -1 : block.layers[static_cast<size_t>(il)].rows_of;
        return from < 0 ? il : from;
    }
    bool makes_rows(int il) const { return attends(il) && rows_of(il) == il; }
    bool shares_rows() const { return n_layer > 0 && rows_of(n_layer - 1) != n_layer - 1; }  // in some layer
    // Factor of scores.
    float attention_scale(int il) const;
    Mixer mixer(int layer) const {
        return block.layers.empty() ? Mixer::attention : block.layers[static_cast<size_t>(layer)].mixer;
    }
    bool attends(int layer) const { return mixer(layer) == Mixer::attention; }
    bool recurs(int layer) const { return !attends(layer) && mixer(layer) != Mixer::none; }
    bool feeds(int layer) const { return n_ffs.empty() || n_ffs[static_cast<size_t>(layer)] > 0; }  // has an FFN
    bool is_mixed() const {  // whether some layer does not attend
        return std::any_of(block.layers.begin(), block.layers.end(),
                           [](const LayerAttention& layer) { return layer.mixer != Mixer::attention; });
    }
    bool has_experts(int layer) const { return n_expert > 0 && layer >= n_dense_layers; }
    bool is_recurrent() const { return recurrence.has_value(); }  // in some layer
    // What a recurrent layer keeps of a sequence: the last inputs of its convolution, and matrices.
    int64_t conv_floats() const {
        return recurrence ? std::visit([](const auto& sizes) { return sizes.conv_floats(); }, *recurrence) : 0;
    }
    int64_t matrix_floats() const {
        return recurrence ? std::visit([](const auto& sizes) { return sizes.matrix_floats(); }, *recurrence) : 0;
    }
    int64_t state_floats() const { return conv_floats() + matrix_floats(); }
};

// Errors: Error when a key is missing, out of range, or describes a block this runtime does not have.
HParams read_hparams(const GgufFile& file);

// A number that files give once or once per layer, in layer il.
std::optional<uint32_t> find_layer_u32(const GgufFile& file, const std::string& key, int n_layer, int il);

// The same where layers must not differ. Errors: Error if they do.
std::optional<uint32_t> find_layers_u32(const GgufFile& file, const std::string& key, int n_layer);

// The float of `key`, or `absent`. Errors: Error if it is not from `low` to `high`, or NaN.
float read_float(const GgufFile& file, const std::string& key, float low, float high, float absent);

}  // namespace lkv
