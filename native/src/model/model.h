// A loaded file: hyperparameters, the cache description, weights as ggml tensors over the mapped file, the vocabulary.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/forks.h"
#include "base/tensor_context.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "gguf/reader.h"
#include "model/cache_spec.h"
#include "model/hparams.h"
#include "model/layer_runs.h"
#include "runtime/vocab.h"

namespace lkv {

// Null where the file has no such tensor. Shapes are ne, as in docs/gguf.md.
struct LayerWeights {
    ggml_tensor* attn_norm = nullptr;  // [n_embd]; null: the branch reads the hidden state as it is
    ggml_tensor* attn_norm_bias = nullptr;
    ggml_tensor* attn_norm_2 = nullptr;  // second input norm: attention reads it, FFN reads attn_norm
    ggml_tensor* attn_norm_2_bias = nullptr;
    ggml_tensor* attn_q = nullptr;  // [n_embd, n_head·head_dim]
    ggml_tensor* attn_q_bias = nullptr;
    ggml_tensor* attn_k = nullptr;  // [n_embd, w]
    ggml_tensor* attn_k_bias = nullptr;
    ggml_tensor* attn_v = nullptr;
    ggml_tensor* attn_v_bias = nullptr;
    ggml_tensor* attn_qkv = nullptr;  // [n_embd, n_head·head_dim + 2w], instead of the three
    ggml_tensor* attn_qkv_bias = nullptr;
    ggml_tensor* attn_q_norm = nullptr;  // [head_dim], of every head
    ggml_tensor* attn_k_norm = nullptr;
    ggml_tensor* attn_q_norm_whole = nullptr;  // [n_head·head_dim], of all heads together, instead
    ggml_tensor* attn_k_norm_whole = nullptr;  // [w]
    ggml_tensor* attn_sinks = nullptr;         // [n_head], logits that take part in the softmax
    ggml_tensor* attn_output = nullptr;        // [n_head·head_dim, n_embd]
    ggml_tensor* attn_output_bias = nullptr;
    ggml_tensor* attn_post_norm = nullptr;  // [n_embd], of what the branch adds

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

    ggml_tensor* ffn_norm = nullptr;  // absent in parallel blocks, or as attn_norm
    ggml_tensor* ffn_norm_bias = nullptr;
    ggml_tensor* ffn_gate_inp = nullptr;  // [n_embd, n_expert], the router of experts
    ggml_tensor* ffn_gate_inp_bias = nullptr;
    // [n_embd, n_ff], of experts [n_embd, n_ff, n_expert]; absent and gated: ffn_up holds [gate | up]
    ggml_tensor* ffn_gate = nullptr;
    ggml_tensor* ffn_gate_bias = nullptr;
    ggml_tensor* ffn_up = nullptr;
    ggml_tensor* ffn_up_bias = nullptr;
    ggml_tensor* ffn_down = nullptr;
    ggml_tensor* ffn_down_bias = nullptr;
    ggml_tensor* ffn_post_norm = nullptr;

    // What the kernels read (ops/latent_attn.h), f32: up-projections by latent channel, small vectors.
    std::vector<float> k_b;     // [n_kv, rank_k max, head_dim]; rotated and absorbed: E_q, where a GPU expands keys
    std::vector<float> v_b;     // [n_kv, rank_v max, head_dim]
    std::vector<float> k_bias;  // [n_kv, head_dim], rebuild only
    std::vector<float> k_norm;  // [head_dim], rebuild only
    std::vector<float> sinks;   // [n_head], where the file has them
    // [n_kv, head_dim], less the bias that is added to all attention to latents of V: sinks have none. Else empty.
    std::vector<float> sink_values;
};

// A tensor's values, wherever it lies.
std::vector<float> to_floats(const ggml_tensor* tensor);

struct ModelOptions {
    std::string latent_path = {};  // a sidecar of the file (model/sidecar.h), or empty
    bool use_mmap = true;
    bool vocab_only = false;
    GpuOptions gpu = {};
    // sizes and forecasts alone, of GPUs that need not be there: weights stay in the file, no session runs
    bool describe_only = false;
};

class Model {
public:
    // Errors: Error for a file that cannot be read, is refused (docs/gguf.md), or lacks a tensor; a sidecar of another one.
    Model(const std::string& path, const ModelOptions& options);
    ~Model();

    const std::string& path() const { return path_; }
    const GgufFile& file() const { return file_; }
    const HParams& hparams() const { return hparams_; }
    const CacheSpec& cache_spec() const { return cache_spec_; }
    const Vocab& vocab() const;  // Error when the file has no tokenizer
    bool has_vocab() const { return vocab_.has_value(); }

    // Where layers run, those of a session, or those that are forecast; the output is with the last ones.
    const std::vector<LayerRun>& runs() const { return runs_; }
    bool on_one_device() const { return runs_.size() == 1; }
    bool on_gpu() const { return runs_.back().on_gpu(); }
    // The first layers, whose graphs are the CPU's: all without a GPU.
    int n_host_layers() const { return runs_.front().on_gpu() ? 0 : runs_.front().end_layer; }
    // Where a run's weights and graphs are. A forecast's are nowhere.
    ggml_backend_buffer_type_t memory(const LayerRun& run) const;
    const std::string& gpu_absent() const { return gpu_absent_; }  // why there is none
    bool gpu_asked() const { return options_.gpu.n_gpu_layers != 0; }
    bool describe_only() const { return options_.describe_only; }
    // Once for a model: that a GPU was asked for and the CPU runs it.
    void warn_if_gpu_absent() const;

    // Rows of the token table, on the host. out: [tokens.size(), n_embd]
    void embed(std::span<const int32_t> tokens, float* out) const;

    ggml_tensor* token_embd() const { return token_embd_; }
    ggml_tensor* position_embd() const { return position_embd_; }
    ggml_tensor* output_norm() const { return output_norm_; }
    ggml_tensor* output_norm_bias() const { return output_norm_bias_; }
    ggml_tensor* output() const { return output_; }
    ggml_tensor* output_bias() const { return output_bias_; }
    const std::vector<LayerWeights>& layers() const { return layers_; }

    // Of what the weights say (gguf/content_hash.h), a sidecar's too; computed when it is first asked for.
    uint64_t content_fingerprint() const;

    size_t size_bytes() const { return size_bytes_; }
    // Weights where they are computed with, of every run. A GPU has no token table, unless it is the output too; the CPU has its factors
    // by channel beside the weights.
    std::vector<size_t> resident_bytes() const;
    size_t factor_bytes() const { return factor_bytes_; }  // of A, B, E and their biases
    int64_t n_params() const { return n_params_; }

private:
    mutable std::once_flag fingerprint_once_;
    mutable uint64_t fingerprint_ = 0;

    void load_tensors();
    void place_weights();
    // Whose weight it is; null: the host's alone, which looks tokens up.
    const LayerRun* run_of(const ggml_tensor* weight) const;
    ggml_tensor* optional_tensor(const std::string& name, std::initializer_list<int64_t> ne);
    ggml_tensor* tensor(const std::string& name, std::initializer_list<int64_t> ne);
    void load_layer(int il);
    void load_head_norm(const std::string& name, int64_t n_heads, ggml_tensor*& of_each, ggml_tensor*& whole);
    void load_ffn(LayerWeights& layer, const std::string& blk);
    void repack_weights();
    void move_weights_to_gpu(const LayerRun& run);

    std::string path_;
    ModelOptions options_;
    mutable std::once_flag gpu_warning_once_;
    GgufFile file_;
    HParams hparams_;
    CacheSpec cache_spec_;
    std::optional<Vocab> vocab_;
    std::vector<ggml_backend_buffer_ptr> mapped_buffers_;  // one for every span of the file
    TensorContext context_;
    std::vector<ggml_backend_buffer_ptr> repacked_;
    std::vector<LayerRun> runs_ = {{}};
    std::string gpu_absent_;
    std::vector<ggml_backend_buffer_ptr> gpu_buffers_;
    int forks_ = forks();               // a child cannot free the GPU's memory
    const char* token_rows_ = nullptr;  // token_embd's data in the mapped file
    std::vector<LayerWeights> layers_;
    ggml_tensor* token_embd_ = nullptr;
    ggml_tensor* position_embd_ = nullptr;
    ggml_tensor* output_norm_ = nullptr;
    ggml_tensor* output_norm_bias_ = nullptr;
    ggml_tensor* output_ = nullptr;
    ggml_tensor* output_bias_ = nullptr;
    size_t size_bytes_ = 0;
    size_t factor_bytes_ = 0;
    int64_t n_params_ = 0;
};

}  // namespace lkv
