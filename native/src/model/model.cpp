#include "model/model.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "base/log.h"
#include "devices/gpus.h"
#include "ggml-cpu.h"
#include "gguf/content_hash.h"
#include "model/mtp.h"
#include "model/older_mla.h"
#include "model/placing.h"
#include "model/sidecar.h"
#include "ops/cuda/routes.h"

namespace lkv {

Model::Model(const std::string& path, const ModelOptions& options)
    : path_(path),
      options_(options),
      file_(std::make_shared<GgufFile>(open_model_file(path, options.latent_path, options.use_mmap))) {
    if (!options.vocab_only) {
        hparams_ = read_hparams(*file_);
    }
    vocab_ = Vocab::from(*file_);
    if (options.vocab_only) {
        return;
    }
    cache_spec_ = read_cache_spec(*file_, hparams_);
    if (vocab_ && vocab_->n_tokens() > hparams_.n_vocab) {
        fail("gguf", "expected at most ", hparams_.n_vocab, " tokens, the rows of token_embd.weight; got ",
             vocab_->n_tokens());
    }
    if (hparams_.has_mla()) host_copies_ = split_mla_factors(*file_, hparams_.mla, hparams_.n_head);
    if (!options.latent_path.empty()) {
        fit_base_tensors(*file_, hparams_, cache_spec_);
    }
    load_tensors();
}

Model::Model(const std::shared_ptr<const Model>& whole, const std::string& path)
    : path_(path.empty() ? whole->path_ : path),
      options_(whole->options_),
      file_(path.empty() ? whole->file_ : std::make_shared<GgufFile>(open_model_file(path, {}, options_.use_mmap))),
      hparams_(mtp_hparams(whole->hparams_, *file_)),
      whole_(whole),
      cache_spec_(full_rows(hparams_)) {
    load_tensors();
}

Model::~Model() {
    if (forks_ == forks()) return;
    for (ggml_backend_buffer_ptr& buffer : gpu_buffers_) static_cast<void>(buffer.release());
}

uint64_t Model::content_fingerprint() const {
    std::call_once(fingerprint_once_,
                   [this] { fingerprint_ = std::stoull(content_hash(*file_).substr(0, 16), nullptr, 16); });
    return fingerprint_;
}

const Vocab& Model::vocab() const {
    if (!vocab_) {
        fail("vocab", "expected tokenizer.* keys in ", path_, "; got none");
    }
    return *vocab_;
}

namespace {

constexpr const char* other_norm = "token_embd_norm.weight";

TokenTable table_of(const ggml_tensor& weight) {
    return {static_cast<const char*>(weight.data), weight.type, weight.ne[0]};
}

}  // namespace

void Model::load_ends() {
    const HParams& h = hparams_;
    token_embd_ = tensors_.need("token_embd.weight", {h.n_embd, h.n_vocab});
    const bool learned = h.block.position == Position::learned;
    position_embd_ = learned ? tensors_.need("position_embd.weight", {h.n_embd, h.n_ctx_train})
                             : tensors_.optional("position_embd.weight", {h.n_embd, h.n_ctx_train});
    if (const int64_t width = h.n_embd_layer; width > 0) {
        layer_embd_ = tensors_.need("per_layer_token_embd.weight", {width * h.n_layer, h.n_vocab});
        layer_proj_ = tensors_.need("per_layer_model_proj.weight", {h.n_embd, width * h.n_layer});
        layer_proj_norm_ = tensors_.need("per_layer_proj_norm.weight", {width});
        layer_rows_ = table_of(*layer_embd_);
    }
    // some files call it by where others have a norm of embeddings
    const bool has_other_name = tensors_.find("output_norm.weight") == nullptr && tensors_.find(other_norm) != nullptr;
    output_norm_ = tensors_.need(has_other_name ? other_norm : "output_norm.weight", {h.n_embd});
    output_norm_bias_ = tensors_.optional("output_norm.bias", {h.n_embd});
    output_ = tensors_.optional("output.weight", {h.n_embd, h.n_vocab});
    output_bias_ = tensors_.optional("output.bias", {h.n_vocab});
    if (output_ == nullptr) {
        output_ = token_embd_;  // tied
    }
}

void Model::load_mtp_ends() {
    const HParams& h = hparams_;
    const std::string own = "blk." + std::to_string(h.first_block) + ".nextn.";
    mtp_.token_norm = tensors_.need(own + "enorm.weight", {h.n_embd});
    mtp_.state_norm = tensors_.need(own + "hnorm.weight", {h.n_embd});
    mtp_.input = tensors_.need(own + "eh_proj.weight", {2 * int64_t{h.n_embd}, h.n_embd});
    token_embd_ = tensors_.optional(own + "embed_tokens.weight", {h.n_embd, h.n_vocab});
    if (token_embd_ == nullptr) token_embd_ = whole_->token_embd_;
    output_norm_ = tensors_.optional(own + "shared_head_norm.weight", {h.n_embd});
    if (output_norm_ == nullptr) output_norm_ = whole_->output_norm_;
    output_ = tensors_.optional(own + "shared_head_head.weight", {h.n_embd, h.n_vocab});
    if (output_ != nullptr) return;
    output_ = whole_->output_;  // once in a GPU's memory
    output_bias_ = whole_->output_bias_;
}

void Model::load_tensors() {
    tensors_ = FileTensors(*file_, path_);
    const HParams& h = hparams_;
    whole_ == nullptr ? load_ends() : load_mtp_ends();
    for (int il = 0; il < h.n_layer; il++) {
        layers_.push_back(load_layer(tensors_, h, cache_spec_.layers[static_cast<size_t>(il)], il));
        factor_bytes_ += lkv::factor_bytes(layers_.back());
    }
    weight_factors_ = tensors_.factors();
    if (whole_ != nullptr && whole_->weight_factors_.contains(output_)) {
        weight_factors_[output_] = whole_->weight_factors_.at(output_);
    }
    if (const std::string name = tensors_.unread_bias(h.first_block, h.n_layer); !name.empty()) {
        fail("gguf", "expected tensors of the ", h.architecture, " architecture; got ", name);
    }
    token_rows_ =
        whole_ != nullptr && token_embd_ == whole_->token_embd_ ? whole_->token_rows_ : table_of(*token_embd_);
    place_weights();
    if (options_.use_mlock && !describe_only()) lock_weights();
}

// What the host computes with, wherever that is now: in the mapped file, or in copies of it.
void Model::lock_weights() {
    std::vector<std::span<const uint8_t>> ranges;
    size_t wanted = 0;
    const auto add = [&](const void* data, size_t bytes) {
        ranges.emplace_back(static_cast<const uint8_t*>(data), bytes);
        wanted += bytes;
    };
    for (const ggml_tensor* const t : tensors_.all()) {
        const LayerRun* const run = run_of(t);
        if (run != nullptr && !run->on_gpu()) add(t->data, ggml_nbytes(t));
    }
    const auto add_table = [&](const TokenTable& table, const ggml_tensor* of) {
        add(table.rows, ggml_row_size(table.type, table.width) * static_cast<size_t>(ggml_nrows(of)));
    };
    if (on_gpu() && whole_ == nullptr) add_table(token_rows_, token_embd_);
    if (on_gpu() && layer_embd_ != nullptr) add_table(layer_rows_, layer_embd_);
    for (const LayerWeights& l : std::span(layers_).first(static_cast<size_t>(n_host_layers()))) {
        add(l.k_b.data(), l.k_b.size() * sizeof(float));
        add(l.v_b.data(), l.v_b.size() * sizeof(float));
    }
    locked_ = LockedMemory(ranges);
    if (locked_.error().empty()) return;
    log(LogLevel::warning, "[mlock] expected to lock ", wanted >> 10, " KiB of weights in memory; got ",
        locked_.bytes() >> 10, " KiB (", locked_.error(), "), as ulimit -l allows ", LockedMemory::limit(),
        "; raise it, or leave out --mlock / use_mlock");
}

int Model::count_wanted_gpus() {
    if (describe_only()) {
        const int named = std::max(static_cast<int>(options_.gpu.tensor_split.size()), options_.gpu.main_gpu + 1);
        return gpu_asked() ? std::max(1, named) : 0;
    }
    if (gpu_asked() || !built_for_gpus()) return count_gpus(gpu_absent_);
    gpu_absent_ = "not asked for, see -ngl";
    return 0;
}

void Model::place_weights() {
    const auto free = [this](int gpu) { return describe_only() ? size_t{1} : gpu_bytes(gpu).free; };
    runs_ = whole_ != nullptr ? std::vector<LayerRun>{{whole_->runs_.back().gpu, 0, hparams_.n_layer}}
                              : place_layers(hparams_.n_layer, options_.gpu, count_wanted_gpus(), free);
    if (!on_one_device() && (hparams_.shares_rows() || hparams_.n_embd_layer > 0)) {
        const char* const why =
            hparams_.shares_rows() ? "some read the K and V of others" : "tokens bring numbers to each";
        fail("-ngl", "expected all layers on one device, as ", why, "; got ", runs_text(runs_));
    }
    const auto n_host = static_cast<size_t>(n_host_layers());
    if (!describe_only() && !options_.weights) {
        for (auto& copy : interleave(std::span(layers_).first(n_host))) host_copies_.push_back(std::move(copy));
    }
    const bool warpgroups = !describe_only() && std::all_of(runs_.begin(), runs_.end(), [](const LayerRun& run) {
        return !run.on_gpu() || gpu_has_warpgroups(run.gpu);
    });
    for (LayerWeights& l : std::span(layers_).subspan(n_host)) {
        if (l.attn_q_e == nullptr || !ever_expands(l.attn_q_e->ne[0], l.attn_q_e->ne[1], warpgroups)) continue;
        l.k_b = to_floats(l.attn_q_e);
    }
    const auto dequantized = options_.weights ? Dequantized(multiplied(), *options_.weights) : Dequantized();
    if (describe_only()) return;
    for (const LayerRun& run : runs_) {
        std::vector<ggml_tensor*> weights = weights_of(run);
        if (!run.on_gpu()) std::erase_if(weights, [&](const ggml_tensor* t) { return !dequantized.has(t); });
        if (weights.empty()) continue;
        const char* const holds = run.end_layer == hparams_.n_layer ? " and the output" : "";
        auto& buffers = run.on_gpu() ? gpu_buffers_ : host_copies_;
        buffers.push_back(move_weights(weights, dequantized, run, memory(run), holds));
    }
    if (!weight_factors_.empty()) return;  // of each input's own
    merged_ = tensor_context(ggml_tensor_overhead() * (layers_.size() + 1));
    for (LayerWeights& l : std::span(layers_).subspan(n_host)) {
        if (!l.recurrent) continue;
        if (auto* const net = std::get_if<DeltaNetWeights>(&*l.recurrent)) merge_inputs(merged_.get(), *net);
    }
}

ggml_backend_buffer_type_t Model::memory(const LayerRun& run) const {
    return run.on_gpu() && !describe_only() ? gpu_memory(run.gpu) : ggml_backend_cpu_buffer_type();
}

void Model::warn_if_gpu_absent() const {
    if (!gpu_asked() || on_gpu()) return;
    std::call_once(gpu_warning_once_, [this] {
        log(LogLevel::warning, "[gpu] expected a GPU for n_gpu_layers ", options_.gpu.n_gpu_layers, "; got none (",
            gpu_absent_, "); every layer runs on the CPU");
    });
}

const LayerRun* Model::run_of(const ggml_tensor* weight) const {
    if (whole_ != nullptr && (weight == token_embd_ || !tensors_.was_asked_for(weight))) return nullptr;
    if (weight == token_embd_ && output_ != token_embd_) return on_gpu() ? nullptr : &runs_.front();
    if (weight == layer_embd_) return on_gpu() ? nullptr : &runs_.front();
    if (weight == position_embd_) return &runs_.front();
    int layer = 0;
    if (std::sscanf(weight->name, "blk.%d.", &layer) != 1) return &runs_.back();
    layer -= hparams_.first_block;
    if (layer < 0 || layer >= hparams_.n_layer) return nullptr;  // nothing reads it
    const auto found =
        std::find_if(runs_.begin(), runs_.end(), [&](const LayerRun& run) { return layer < run.end_layer; });
    return found == runs_.end() ? &runs_.back() : &*found;
}

std::vector<ggml_tensor*> Model::weights_of(const LayerRun& run) const {
    std::vector<ggml_tensor*> found = tensors_.all();
    std::erase_if(found, [&](const ggml_tensor* weight) { return run_of(weight) != &run; });
    // what one product may take comes one after the other
    for (const LayerWeights& l : std::span(layers_).subspan(static_cast<size_t>(n_host_layers()))) {
        if (!l.recurrent) continue;
        for (ggml_tensor* const weight : std::visit([](const auto& own) { return own.inputs(); }, *l.recurrent)) {
            if (std::erase(found, weight) > 0) found.push_back(weight);
        }
    }
    return found;
}

std::vector<ggml_tensor*> Model::multiplied() const {
    std::vector<ggml_tensor*> found = tensors_.all();
    std::erase_if(found, [&](const ggml_tensor* weight) {
        const bool looked_up =
            weight == layer_embd_ || weight == position_embd_ || (weight == token_embd_ && output_ != token_embd_);
        return looked_up || !tensors_.was_asked_for(weight);
    });
    return found;
}

std::vector<size_t> Model::resident_bytes() const {
    std::vector<size_t> bytes(runs_.size(), 0);
    for (const ggml_tensor* t : tensors_.all()) {
        if (const LayerRun* const run = run_of(t)) bytes[static_cast<size_t>(run - runs_.data())] += ggml_nbytes(t);
    }
    for (const LayerWeights& l : std::span(layers_).first(static_cast<size_t>(n_host_layers()))) {
        bytes.front() += (l.k_b.size() + l.v_b.size()) * sizeof(float);
    }
    return bytes;
}

double Model::cost() const {
    const auto all = [](const std::vector<size_t>& bytes) {
        return static_cast<double>(std::accumulate(bytes.begin(), bytes.end(), size_t{0}));
    };
    const double shared = output_ == whole_->output_ ? static_cast<double>(ggml_nbytes(output_)) : 0.0;
    return (all(resident_bytes()) + shared) / all(whole_->resident_bytes());
}

namespace {

void look_up(const TokenTable& table, std::span<const int32_t> tokens, float* out) {
    const size_t row_bytes = ggml_row_size(table.type, table.width);
    for (const int32_t token : tokens) {
        const char* const row = table.rows + static_cast<size_t>(token) * row_bytes;
        if (table.type == GGML_TYPE_F32) {
            std::memcpy(out, row, row_bytes);
        } else {
            ggml_get_type_traits(table.type)->to_float(row, out, table.width);
        }
        out += table.width;
    }
}

}  // namespace

void Model::embed(std::span<const int32_t> tokens, float* out) const { look_up(token_rows_, tokens, out); }

void Model::embed_layers(std::span<const int32_t> tokens, float* out) const { look_up(layer_rows_, tokens, out); }

}  // namespace lkv
