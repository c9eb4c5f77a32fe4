#include "model/model.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "devices/gpus.h"
#include "ggml-alloc.h"
#include "ggml-cpu.h"
#include "gguf/content_hash.h"
#include "model/sidecar.h"
#include "ops/latent_attn.h"

namespace lkv {
namespace {

std::string shape_text(const int64_t* ne, int n_dims) {
    std::string text = "[";
    for (int i = 0; i < n_dims; i++) {
        text += (i == 0 ? "" : ", ") + std::to_string(ne[i]);
    }
    return text + "]";
}

// What ggml multiplies by and what it adds: of another type it would end the process.
void check_type(const ggml_tensor* weight, bool is_matrix) {
    const ggml_type type = weight->type;
    if (!is_matrix && type != GGML_TYPE_F32) {
        fail("gguf", "expected ", weight->name, " in f32; got ", ggml_type_name(type));
    }
    const bool has_floats = type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
    if (!has_floats || ggml_get_type_traits_cpu(type)->vec_dot == nullptr) {
        fail("gguf", "expected ", weight->name, " in a type of weights; got ", ggml_type_name(type));
    }
}

// [rank, n_kv·head_dim] with the rank contiguous -> [n_kv, rank, head_dim]: row c is what latent channel c adds to a head.
std::vector<float> by_channel(const ggml_tensor* b, int n_kv, int head_dim) {
    const std::vector<float> source = to_floats(b);
    const int rank = static_cast<int>(b->ne[0]);
    std::vector<float> out(source.size());
    for (int j = 0; j < n_kv; j++) {
        for (int i = 0; i < head_dim; i++) {
            for (int c = 0; c < rank; c++) {
                out[(static_cast<size_t>(j) * rank + c) * head_dim + i] =
                    source[(static_cast<size_t>(j) * head_dim + i) * rank + c];
            }
        }
    }
    return out;
}

// The buffer type in which the CPU backend multiplies by this weight fastest, or null for the plain one.
ggml_backend_buffer_type_t repacked_type(ggml_backend_dev_t device, const ggml_tensor* weight) {
    auto* const registry = ggml_backend_dev_backend_reg(device);
    const auto get_types = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_dev_get_extra_bufts"));
    if (get_types == nullptr) {
        return nullptr;
    }
    for (ggml_backend_buffer_type_t* type = get_types(device); type != nullptr && *type != nullptr; type++) {
        const TensorContext scratch = tensor_context(ggml_tensor_overhead() * 4);
        ggml_tensor* const copy = ggml_new_tensor(scratch.get(), weight->type, ggml_n_dims(weight), weight->ne);
        const ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(*type, 0));
        copy->buffer = empty.get();
        ggml_tensor* op = nullptr;
        if (ggml_n_dims(weight) == 3) {
            ggml_tensor* const column = ggml_new_tensor_3d(scratch.get(), GGML_TYPE_F32, weight->ne[0], 1, 512);
            op = ggml_mul_mat_id(scratch.get(), copy, column, ggml_new_tensor_2d(scratch.get(), GGML_TYPE_I32, 1, 512));
        } else {
            op =
                ggml_mul_mat(scratch.get(), copy, ggml_new_tensor_2d(scratch.get(), GGML_TYPE_F32, weight->ne[0], 512));
        }
        const bool fits = ggml_backend_dev_supports_op(device, op);
        copy->buffer = nullptr;
        if (fits) {
            return *type;
        }
    }
    return nullptr;
}

}  // namespace

std::vector<float> to_floats(const ggml_tensor* tensor) {
    std::vector<uint8_t> copy;
    const void* data = tensor->data;
    if (!ggml_backend_buffer_is_host(tensor->buffer)) {
        copy.resize(ggml_nbytes(tensor));
        ggml_backend_tensor_get(tensor, copy.data(), 0, copy.size());
        data = copy.data();
    }
    std::vector<float> out(static_cast<size_t>(ggml_nelements(tensor)));
    if (tensor->type == GGML_TYPE_F32) {
        std::memcpy(out.data(), data, ggml_nbytes(tensor));
    } else {
        ggml_get_type_traits(tensor->type)->to_float(data, out.data(), ggml_nelements(tensor));
    }
    return out;
}

Model::Model(const std::string& path, const ModelOptions& options)
    : path_(path), options_(options), file_(open_model_file(path, options.latent_path, options.use_mmap)) {
    if (!options.vocab_only) {
        hparams_ = read_hparams(file_);
    }
    vocab_ = Vocab::from(file_);
    if (options.vocab_only) {
        return;
    }
    cache_spec_ = read_cache_spec(file_, hparams_);
    if (vocab_ && vocab_->n_tokens() > hparams_.n_vocab) {
        fail("gguf", "expected at most ", hparams_.n_vocab, " tokens, the rows of token_embd.weight; got ",
             vocab_->n_tokens());
    }
    if (!options.latent_path.empty()) {
        fit_base_tensors(file_, hparams_, cache_spec_);
    }
    load_tensors();
}

Model::~Model() {
    if (forks_ == forks()) return;
    for (ggml_backend_buffer_ptr& buffer : gpu_buffers_) static_cast<void>(buffer.release());
}

uint64_t Model::content_fingerprint() const {
    std::call_once(fingerprint_once_,
                   [this] { fingerprint_ = std::stoull(content_hash(file_).substr(0, 16), nullptr, 16); });
    return fingerprint_;
}

const Vocab& Model::vocab() const {
    if (!vocab_) {
        fail("vocab", "expected tokenizer.* keys in ", path_, "; got none");
    }
    return *vocab_;
}

ggml_tensor* Model::optional_tensor(const std::string& name, std::initializer_list<int64_t> ne) {
    ggml_tensor* const found = ggml_get_tensor(context_.get(), name.c_str());
    if (found == nullptr) {
        return nullptr;
    }
    std::array<int64_t, GGML_MAX_DIMS> expected = {1, 1, 1, 1};
    std::copy(ne.begin(), ne.end(), expected.begin());
    if (!std::equal(expected.begin(), expected.end(), found->ne)) {
        fail("gguf", "expected ", name, " with ne ", shape_text(expected.data(), static_cast<int>(ne.size())), "; got ",
             shape_text(found->ne, ggml_n_dims(found)));
    }
    check_type(found, ne.size() > 1 && !name.ends_with(".bias"));
    return found;
}

ggml_tensor* Model::tensor(const std::string& name, std::initializer_list<int64_t> ne) {
    ggml_tensor* const found = optional_tensor(name, ne);
    if (found == nullptr) {
        fail("gguf", "expected a tensor ", name, "; got none");
    }
    return found;
}

void Model::load_tensors() {
    context_ = tensor_context(ggml_tensor_overhead() * (file_.tensors().size() + 1));
    // ggml wants the whole span that its tensors point into; it never writes to weights
    for (const auto& span : file_.spans()) {
        mapped_buffers_.emplace_back(ggml_backend_cpu_buffer_from_ptr(const_cast<uint8_t*>(span.data()), span.size()));
        ggml_backend_buffer_set_usage(mapped_buffers_.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    for (const TensorInfo& info : file_.tensors()) {
        ggml_tensor* const weight = ggml_new_tensor(context_.get(), info.type, info.n_dims, info.ne);
        ggml_set_name(weight, info.name.c_str());
        const auto place = std::find_if(file_.spans().begin(), file_.spans().end(), [&](const auto& span) {
            return info.data >= span.data() && info.data < span.data() + span.size();
        });
        ggml_backend_buffer_t const buffer = mapped_buffers_[static_cast<size_t>(place - file_.spans().begin())].get();
        if (ggml_backend_tensor_alloc(buffer, weight, const_cast<uint8_t*>(info.data)) != GGML_STATUS_SUCCESS) {
            fail("gguf", "expected room for ", info.name, "; got a tensor past the data of ", path_);
        }
        size_bytes_ += info.bytes;
        n_params_ += ggml_nelements(weight);
    }

    const HParams& h = hparams_;
    token_embd_ = tensor("token_embd.weight", {h.n_embd, h.n_vocab});
    if (h.block.position == Position::learned) {
        position_embd_ = tensor("position_embd.weight", {h.n_embd, h.n_ctx_train});
    } else {
        position_embd_ = optional_tensor("position_embd.weight", {h.n_embd, h.n_ctx_train});
    }
    output_norm_ = tensor("output_norm.weight", {h.n_embd});
    output_norm_bias_ = optional_tensor("output_norm.bias", {h.n_embd});
    output_ = optional_tensor("output.weight", {h.n_embd, h.n_vocab});
    output_bias_ = optional_tensor("output.bias", {h.n_vocab});
    if (output_ == nullptr) {
        output_ = token_embd_;  // tied
    }
    for (int il = 0; il < h.n_layer; il++) {
        load_layer(il);
    }
    token_rows_ = static_cast<const char*>(token_embd_->data);
    place_weights();
}

void Model::place_weights() {
    const GpuOptions& asked = options_.gpu;
    int n_gpus = 0;
    if (describe_only()) {
        const int named = std::max(static_cast<int>(asked.tensor_split.size()), asked.main_gpu + 1);
        n_gpus = gpu_asked() ? std::max(1, named) : 0;
    } else if (gpu_asked() || !built_for_gpus()) {
        n_gpus = count_gpus(gpu_absent_);
    } else {
        gpu_absent_ = "not asked for, see -ngl";
    }
    const auto free = [this](int gpu) { return describe_only() ? size_t{1} : gpu_bytes(gpu).free; };
    runs_ = place_layers(hparams_.n_layer, asked, n_gpus, free);
    if (!describe_only()) repack_weights();
    // see AttentionBranch::expands_keys
    for (int il = n_host_layers(); il < hparams_.n_layer; il++) {
        LayerWeights& l = layers_[static_cast<size_t>(il)];
        if (l.attn_q_e == nullptr || hparams_.head_dim > most_expanded_head) continue;
        if (l.attn_q_e->ne[1] >= 2 * int64_t{hparams_.head_dim}) l.k_b = to_floats(l.attn_q_e);
    }
    for (const LayerRun& run : runs_) {
        if (run.on_gpu() && !describe_only()) move_weights_to_gpu(run);
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

void Model::load_layer(int il) {
    const HParams& h = hparams_;
    const LayerCacheSpec& spec = cache_spec_.layers[static_cast<size_t>(il)];
    const std::string blk = "blk." + std::to_string(il) + ".";
    const int64_t d = h.n_embd;
    const int64_t w = h.width_kv();
    const int64_t wq = h.width_q();
    LayerWeights l;

    l.attn_post_norm = optional_tensor(blk + "post_attention_norm.weight", {d});
    l.ffn_post_norm = optional_tensor(blk + "post_ffw_norm.weight", {d});
    l.attn_norm = l.attn_post_norm == nullptr ? tensor(blk + "attn_norm.weight", {d})
                                              : optional_tensor(blk + "attn_norm.weight", {d});
    l.attn_norm_bias = optional_tensor(blk + "attn_norm.bias", {d});
    l.attn_norm_2 = optional_tensor(blk + "attn_norm_2.weight", {d});
    l.attn_norm_2_bias = optional_tensor(blk + "attn_norm_2.bias", {d});
    l.attn_qkv = optional_tensor(blk + "attn_qkv.weight", {d, wq + 2 * w});
    l.attn_qkv_bias = optional_tensor(blk + "attn_qkv.bias", {wq + 2 * w});
    const bool k_weight = spec.k_path == KPath::full || spec.k_path == KPath::rotated || spec.k.encoded;
    const bool v_weight = spec.v_path == VPath::full || spec.v.encoded;
    if (l.attn_qkv == nullptr) {
        l.attn_q = tensor(blk + "attn_q.weight", {d, wq});
        l.attn_k = k_weight ? tensor(blk + "attn_k.weight", {d, w}) : nullptr;
        l.attn_v = v_weight ? tensor(blk + "attn_v.weight", {d, w}) : nullptr;
    } else if ((spec.k_path != KPath::full && spec.k_path != KPath::rotated) || spec.v_path != VPath::full) {
        fail("gguf", "expected ", blk, "attn_q.weight beside latent K or V; got packed ", blk, "attn_qkv.weight");
    }
    l.attn_q_bias = optional_tensor(blk + "attn_q.bias", {wq});
    l.attn_k_bias = optional_tensor(blk + "attn_k.bias", {w});
    l.attn_v_bias = optional_tensor(blk + "attn_v.bias", {w});
    load_head_norm(blk + "attn_q_norm.weight", h.n_head, l.attn_q_norm, l.attn_q_norm_whole);
    load_head_norm(blk + "attn_k_norm.weight", h.n_kv, l.attn_k_norm, l.attn_k_norm_whole);
    l.attn_output = tensor(blk + "attn_output.weight", {wq, d});
    l.attn_output_bias = optional_tensor(blk + "attn_output.bias", {d});

    l.attn_sinks = optional_tensor(blk + "attn_sinks.weight", {h.n_head});
    if (l.attn_sinks != nullptr) {
        l.sinks = to_floats(l.attn_sinks);
        if (spec.v_path == VPath::latent && l.attn_v_bias != nullptr) {
            l.sink_values = to_floats(l.attn_v_bias);
            for (float& x : l.sink_values) x = -x;
        }
    }

    const int64_t rank_k = spec.k.rank_max();
    const int64_t rank_v = spec.v.rank_max();
    if (spec.k_path == KPath::rotated || spec.k.encoded) {
        l.attn_k_e =
            tensor(blk + "attn_k_e.weight", {static_cast<int64_t>(spec.k.group) * h.head_dim, spec.k.rank_sum()});
        if (spec.k_path != KPath::rotated) l.attn_k_e_bias = optional_tensor(blk + "attn_k_e.bias", {w});
    } else if (spec.k_path != KPath::full) {
        if (l.attn_k_norm_whole != nullptr) {
            fail("gguf", "expected ", blk, "attn_k_e.weight, latents of K behind its norm over all heads; got none");
        }
        l.attn_k_a = tensor(blk + "attn_k_a.weight", {d, spec.k.rank_sum()});
        l.attn_k_a_bias = optional_tensor(blk + "attn_k_a.bias", {spec.k.rank_sum()});
    }
    if (spec.k_path == KPath::rebuild) {
        l.attn_k_b = tensor(blk + "attn_k_b.weight", {rank_k, w});
        l.k_b = by_channel(l.attn_k_b, h.n_kv, h.head_dim);
        if (l.attn_k_bias != nullptr) {
            l.k_bias = to_floats(l.attn_k_bias);
        }
        if (l.attn_k_norm != nullptr) {
            l.k_norm = to_floats(l.attn_k_norm);
        }
    }
    if (spec.k_path == KPath::rotated || spec.k_path == KPath::absorbed) {
        l.attn_q_e = tensor(blk + "attn_q_e.weight", {h.head_dim, rank_k, h.n_kv});
    }
    if (spec.v_path == VPath::latent) {
        if (spec.v.encoded) {
            l.attn_v_e =
                tensor(blk + "attn_v_e.weight", {static_cast<int64_t>(spec.v.group) * h.head_dim, spec.v.rank_sum()});
            l.attn_v_e_bias = optional_tensor(blk + "attn_v_e.bias", {w});
        } else {
            l.attn_v_a = tensor(blk + "attn_v_a.weight", {d, spec.v.rank_sum()});
            l.attn_v_a_bias = optional_tensor(blk + "attn_v_a.bias", {spec.v.rank_sum()});
        }
        l.attn_v_b = tensor(blk + "attn_v_b.weight", {rank_v, w});
        l.v_b = by_channel(l.attn_v_b, h.n_kv, h.head_dim);
    }

    l.ffn_norm = optional_tensor(blk + "ffn_norm.weight", {d});
    l.ffn_norm_bias = optional_tensor(blk + "ffn_norm.bias", {d});
    // a branch has a norm: this one is the FFN's under another name
    if (l.ffn_norm == nullptr && l.ffn_post_norm == nullptr && l.attn_norm != nullptr) {
        std::swap(l.ffn_norm, l.attn_post_norm);
    }
    if (l.ffn_norm == nullptr && l.ffn_post_norm == nullptr && !h.block.parallel) {
        fail("gguf", "expected a tensor ", blk, "ffn_norm.weight; got none");
    }
    load_ffn(l, blk);
    for (const ggml_tensor* factor : {l.attn_k_a, l.attn_k_a_bias, l.attn_k_b, l.attn_k_e, l.attn_k_e_bias, l.attn_q_e,
                                      l.attn_v_a, l.attn_v_a_bias, l.attn_v_b, l.attn_v_e, l.attn_v_e_bias}) {
        factor_bytes_ += factor == nullptr ? 0 : ggml_nbytes(factor);
    }
    layers_.push_back(std::move(l));
}

// A weight as wide as one head is every head's norm, one as wide as all of them theirs together.
void Model::load_head_norm(const std::string& name, int64_t n_heads, ggml_tensor*& of_each, ggml_tensor*& whole) {
    const TensorInfo* const found = file_.find_tensor(name);
    const int64_t width = n_heads * hparams_.head_dim;
    if (found != nullptr && n_heads > 1 && found->ne[0] == width) {
        whole = tensor(name, {width});
    } else {
        of_each = optional_tensor(name, {hparams_.head_dim});
    }
}

void Model::load_ffn(LayerWeights& l, const std::string& blk) {
    const HParams& h = hparams_;
    const int64_t d = h.n_embd;
    const int64_t ff = h.n_ff;
    if (h.block.ffn == Ffn::experts) {
        const int64_t n = h.n_expert;
        l.ffn_gate_inp = tensor(blk + "ffn_gate_inp.weight", {d, n});
        l.ffn_gate_inp_bias = optional_tensor(blk + "ffn_gate_inp.bias", {n});
        l.ffn_gate = tensor(blk + "ffn_gate_exps.weight", {d, ff, n});
        l.ffn_gate_bias = optional_tensor(blk + "ffn_gate_exps.bias", {ff, n});
        l.ffn_up = tensor(blk + "ffn_up_exps.weight", {d, ff, n});
        l.ffn_up_bias = optional_tensor(blk + "ffn_up_exps.bias", {ff, n});
        l.ffn_down = tensor(blk + "ffn_down_exps.weight", {ff, d, n});
        l.ffn_down_bias = optional_tensor(blk + "ffn_down_exps.bias", {d, n});
        return;
    }
    const bool packed_up = h.block.ffn == Ffn::gated && file_.find_tensor(blk + "ffn_gate.weight") == nullptr;
    if (packed_up && h.block.activation == Activation::swiglu_oai) {
        fail("gguf", "expected a tensor ", blk, "ffn_gate.weight; got none");
    }
    const int64_t up = packed_up ? 2 * ff : ff;
    if (h.block.ffn == Ffn::gated && !packed_up) {
        l.ffn_gate = tensor(blk + "ffn_gate.weight", {d, ff});
        l.ffn_gate_bias = optional_tensor(blk + "ffn_gate.bias", {ff});
    }
    l.ffn_up = tensor(blk + "ffn_up.weight", {d, up});
    l.ffn_up_bias = optional_tensor(blk + "ffn_up.bias", {up});
    l.ffn_down = tensor(blk + "ffn_down.weight", {ff, d});
    l.ffn_down_bias = optional_tensor(blk + "ffn_down.bias", {d});
}

// Some weight types multiply faster in an interleaved layout; those few are copied once, the rest stay in the mapped file.
void Model::repack_weights() {
    const ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    size_t bytes = 0;
    for (int il = 0; il < n_host_layers(); il++) {
        const LayerWeights& l = layers_[static_cast<size_t>(il)];
        for (ggml_tensor* weight : {l.attn_q, l.attn_k, l.attn_v, l.attn_qkv, l.attn_output, l.attn_k_a, l.attn_v_a,
                                    l.ffn_gate, l.ffn_up, l.ffn_down}) {
            if (weight == nullptr || !ggml_is_quantized(weight->type)) {
                continue;
            }
            const ggml_backend_buffer_type_t type = repacked_type(device, weight);
            if (type == nullptr) {
                continue;
            }
            const void* const source = weight->data;
            repacked_.emplace_back(quietly(
                [&] { return ggml_backend_buft_alloc_buffer(type, ggml_backend_buft_get_alloc_size(type, weight)); }));
            if (repacked_.back() == nullptr) {
                fail("memory", "expected room for ", weight->name, "; got none in ", ggml_backend_buft_name(type));
            }
            ggml_backend_buffer_set_usage(repacked_.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            weight->data = nullptr;
            weight->buffer = nullptr;
            if (ggml_backend_tensor_alloc(repacked_.back().get(), weight,
                                          ggml_backend_buffer_get_base(repacked_.back().get())) !=
                GGML_STATUS_SUCCESS) {
                fail("memory", "expected room for ", weight->name, "; got none in ", ggml_backend_buft_name(type));
            }
            ggml_backend_tensor_set(weight, source, 0, ggml_nbytes(weight));
            bytes += ggml_nbytes(weight);
        }
    }
    if (bytes > 0) {
        log(LogLevel::info, "weights: ", bytes >> 20, " MiB copied to the CPU's interleaved layout");
    }
}

const LayerRun* Model::run_of(const ggml_tensor* weight) const {
    if (weight == token_embd_ && output_ != token_embd_) return on_gpu() ? nullptr : &runs_.front();
    if (weight == position_embd_) return &runs_.front();
    int layer = 0;
    if (std::sscanf(weight->name, "blk.%d.", &layer) != 1) return &runs_.back();
    const auto found =
        std::find_if(runs_.begin(), runs_.end(), [&](const LayerRun& run) { return layer < run.end_layer; });
    return found == runs_.end() ? &runs_.back() : &*found;
}

std::vector<size_t> Model::resident_bytes() const {
    std::vector<size_t> bytes(runs_.size(), 0);
    for (const ggml_tensor* t = ggml_get_first_tensor(context_.get()); t != nullptr;
         t = ggml_get_next_tensor(context_.get(), const_cast<ggml_tensor*>(t))) {
        if (const LayerRun* const run = run_of(t)) bytes[static_cast<size_t>(run - runs_.data())] += ggml_nbytes(t);
    }
    for (int il = 0; il < n_host_layers(); il++) {
        const LayerWeights& l = layers_[static_cast<size_t>(il)];
        bytes.front() += (l.k_b.size() + l.v_b.size()) * sizeof(float);
    }
    return bytes;
}

void Model::move_weights_to_gpu(const LayerRun& run) {
    ggml_backend_buffer_type_t const where = memory(run);
    const size_t alignment = ggml_backend_buft_get_alignment(where);
    std::vector<ggml_tensor*> weights;
    size_t bytes = 0;
    for (ggml_tensor* t = ggml_get_first_tensor(context_.get()); t != nullptr;
         t = ggml_get_next_tensor(context_.get(), t)) {
        if (run_of(t) != &run) continue;
        weights.push_back(t);
        bytes += GGML_PAD(ggml_backend_buft_get_alloc_size(where, t), alignment);
    }
    gpu_buffers_.emplace_back(quietly([&] { return ggml_backend_buft_alloc_buffer(where, bytes); }));
    ggml_backend_buffer_t const buffer = gpu_buffers_.back().get();
    if (buffer == nullptr) {
        fail("memory", "expected ", bytes >> 20, " MiB on GPU ", run.gpu,
             " for the weights; got none; use -ngl auto, fewer layers, or another --tensor-split");
    }
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_tallocr place = ggml_tallocr_new(buffer);
    for (ggml_tensor* const t : weights) {
        const void* const source = t->data;
        t->data = nullptr;
        t->buffer = nullptr;
        if (ggml_tallocr_alloc(&place, t) != GGML_STATUS_SUCCESS) {
            fail("memory", "expected room for ", t->name, "; got none on GPU ", run.gpu);
        }
        ggml_backend_tensor_set(t, source, 0, ggml_nbytes(t));
    }
    log(LogLevel::info, "weights: ", bytes >> 20, " MiB on GPU ", run.gpu, ", layers ", run.first_layer, " to ",
        run.end_layer - 1, run.end_layer == hparams_.n_layer ? " and the output" : "");
}

void Model::embed(std::span<const int32_t> tokens, float* out) const {
    const int64_t width = token_embd_->ne[0];
    const size_t row_bytes = ggml_row_size(token_embd_->type, width);
    for (const int32_t token : tokens) {
        const char* const row = token_rows_ + static_cast<size_t>(token) * row_bytes;
        if (token_embd_->type == GGML_TYPE_F32) {
            std::memcpy(out, row, row_bytes);
        } else {
            ggml_get_type_traits(token_embd_->type)->to_float(row, out, width);
        }
        out += width;
    }
}

}  // namespace lkv
