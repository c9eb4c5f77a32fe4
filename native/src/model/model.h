// A loaded file: hyperparameters, the cache description, weights as ggml tensors over the mapped file, the vocabulary.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/forks.h"
#include "base/locked_memory.h"
#include "cache/spec/cache_spec.h"
#include "decoder/hparams.h"
#include "devices/layer_runs.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "gguf/reader.h"
#include "model/file_tensors.h"
#include "model/weights.h"
#include "tokens/vocab.h"

namespace lkv {

// Rows of the mapped file that only the host looks up.
struct TokenTable {
    const char* rows = nullptr;
    ggml_type type = GGML_TYPE_F32;
    int64_t width = 0;
};

struct ModelOptions {
    std::string latent_path = {};  // a sidecar of the file (model/sidecar.h), or empty
    bool use_mmap = true;
    bool use_mlock = false;  // the host's weights stay in memory
    bool vocab_only = false;
    GpuOptions gpu = {};
    std::optional<ggml_type> weights = {};  // the type that products read weights in; none: the file's
    // for sizes and forecasts only: weights stay in the file, no session runs, and GPUs need not exist
    bool describe_only = false;
};

class Model {
public:
    // Errors: Error for a file that cannot be read, is refused (docs/gguf.md), or lacks a tensor; a sidecar of another one.
    Model(const std::string& path, const ModelOptions& options);
    // What guesses further tokens for a model (model/mtp.h), on the device of its last layers: in its own file, or in that at `path`.
    // Embeddings and output are the model's, where no others are there for it. Errors: those of mtp_hparams(), and of files
    explicit Model(const std::shared_ptr<const Model>& whole, const std::string& path = {});
    ~Model();

    const std::string& path() const { return path_; }
    const GgufFile& file() const { return *file_; }
    const HParams& hparams() const { return hparams_; }
    const CacheSpec& cache_spec() const { return cache_spec_; }
    const Vocab& vocab() const;  // Error when the file has no tokenizer
    bool has_vocab() const { return vocab_.has_value(); }

    // Which device runs which layers, in a session or in a forecast. The output is with the last layers.
    const std::vector<LayerRun>& runs() const { return runs_; }
    bool on_one_device() const { return runs_.size() == 1; }
    bool on_gpu() const { return runs_.back().on_gpu(); }
    // The number of first layers that run on the CPU; all of them without a GPU.
    int n_host_layers() const { return runs_.front().on_gpu() ? 0 : runs_.front().end_layer; }
    // The memory of a run's weights and graphs; none in a forecast.
    ggml_backend_buffer_type_t memory(const LayerRun& run) const;
    const std::string& gpu_absent() const { return gpu_absent_; }  // why no GPU is used
    bool gpu_asked() const { return options_.gpu.n_gpu_layers != 0; }
    std::optional<ggml_type> weights() const { return options_.weights; }
    bool describe_only() const { return options_.describe_only; }
    // Warns once per model that a GPU was requested and the CPU is used.
    void warn_if_gpu_absent() const;

    // Rows of the token table, on the host. out: [tokens.size(), n_embd]
    void embed(std::span<const int32_t> tokens, float* out) const;
    // What tokens bring to all layers: f32 [n_embd_layer · n_layer, n] -> out; their model has n_embd_layer.
    void embed_layers(std::span<const int32_t> tokens, float* out) const;

    ggml_tensor* token_embd() const { return token_embd_; }
    ggml_tensor* position_embd() const { return position_embd_; }
    ggml_tensor* layer_proj() const { return layer_proj_; }            // [n_embd, n_embd_layer · n_layer]
    ggml_tensor* layer_proj_norm() const { return layer_proj_norm_; }  // [n_embd_layer]
    ggml_tensor* output_norm() const { return output_norm_; }
    ggml_tensor* output_norm_bias() const { return output_norm_bias_; }
    ggml_tensor* output() const { return output_; }
    ggml_tensor* output_bias() const { return output_bias_; }
    const std::vector<LayerWeights>& layers() const { return layers_; }
    const MtpWeights& mtp() const { return mtp_; }

    // Hash of the weights (gguf/content_hash.h), a sidecar's included; computed on first use.
    uint64_t content_fingerprint() const;

    const WeightFactors& weight_factors() const { return weight_factors_; }

    size_t size_bytes() const { return tensors_.bytes(); }
    // Weights where they are computed with, of every run and in the type that they have there. A GPU has no token table, unless it is the output too; the CPU has its factors
    // by channel beside the weights.
    std::vector<size_t> resident_bytes() const;
    size_t factor_bytes() const { return factor_bytes_; }  // A, B, E and their biases
    // Where this guesses for another model: what one token of it takes, in tokens of the other.
    double cost() const;
    int64_t n_params() const { return tensors_.n_params(); }

private:
    mutable std::once_flag fingerprint_once_;
    mutable uint64_t fingerprint_ = 0;

    void load_tensors();
    void load_ends();      // what comes before the first layer and after the last
    void load_mtp_ends();  // the same, where those are of another model
    void place_weights();
    // The run that a weight belongs to; null: only the host uses it, to look up tokens, or nothing does.
    const LayerRun* run_of(const ggml_tensor* weight) const;
    int count_wanted_gpus();
    void lock_weights();
    std::vector<ggml_tensor*> weights_of(const LayerRun& run) const;
    // Weights that are multiplied by; the rest are looked up, or nothing reads them.
    std::vector<ggml_tensor*> multiplied() const;

    std::string path_;
    ModelOptions options_;
    mutable std::once_flag gpu_warning_once_;
    std::shared_ptr<GgufFile> file_;
    HParams hparams_;
    std::shared_ptr<const Model> whole_;  // whose file this guesses for, else null
    CacheSpec cache_spec_;
    std::optional<Vocab> vocab_;
    FileTensors tensors_;
    WeightFactors weight_factors_;
    std::vector<ggml_backend_buffer_ptr> host_copies_;
    std::vector<LayerRun> runs_ = {{}};
    std::string gpu_absent_;
    std::vector<ggml_backend_buffer_ptr> gpu_buffers_;
    TensorContext merged_;   // tensors of several weights, in those buffers
    int forks_ = forks();    // a child cannot free the GPU's memory
    TokenTable token_rows_;  // token_embd's
    TokenTable layer_rows_;  // layer_embd's
    std::vector<LayerWeights> layers_;
    MtpWeights mtp_;
    ggml_tensor* token_embd_ = nullptr;
    ggml_tensor* position_embd_ = nullptr;
    ggml_tensor* layer_embd_ = nullptr;
    ggml_tensor* layer_proj_ = nullptr;
    ggml_tensor* layer_proj_norm_ = nullptr;
    ggml_tensor* output_norm_ = nullptr;
    ggml_tensor* output_norm_bias_ = nullptr;
    ggml_tensor* output_ = nullptr;
    ggml_tensor* output_bias_ = nullptr;
    size_t factor_bytes_ = 0;
    LockedMemory locked_;
};

}  // namespace lkv
