#include "model/weights.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace lkv {
namespace {

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

class Loader {
public:
    Loader(const FileTensors& tensors, const HParams& hparams, const LayerCacheSpec& spec, int il)
        : tensors_(tensors),
          h_(hparams),
          il_(il),
          heads_(hparams.heads_of(il)),
          spec_(spec),
          wq_(hparams.width_q(il)),
          n_ff_(hparams.n_ffs.empty() ? 0 : hparams.n_ffs[static_cast<size_t>(il)]),
          attends_(hparams.attends(il)),
          has_experts_(hparams.has_experts(il)),
          blk_("blk." + std::to_string(hparams.first_block + il) + ".") {}

    LayerWeights load() {
        load_norms();
        load_mixer();
        if (!h_.feeds(il_)) return std::move(l_);
        has_experts_ ? load_experts() : load_ffn();
        if (h_.block.ffn == Ffn::gated_and_experts) load_beside_experts();
        return std::move(l_);
    }

private:
    ggml_tensor* need(const char* role, std::initializer_list<int64_t> ne) const {
        return tensors_.need(blk_ + role, ne);
    }
    ggml_tensor* optional(const char* role, std::initializer_list<int64_t> ne) const {
        return tensors_.optional(blk_ + role, ne);
    }
    bool is_full_key() const {
        return spec_.k_path == KPath::full || spec_.k_path == KPath::rotated || spec_.key_of_value();
    }

    void load_attention() {
        if (h_.has_mla()) return load_mla();
        load_projections();
        load_sinks();
        load_keys();
        load_values();
    }
    void load_mla();
    void load_mixer() {
        if (attends_) load_attention();
        if (!h_.recurs(il_)) return;
        std::visit([&](const auto& sizes) { l_.recurrent = load_recurrent(tensors_, sizes, h_.n_embd, blk_); },
                   *h_.recurrence);
    }
    void load_projections();
    void load_value_projection();
    void load_head_norm(const char* role, int64_t n_heads, ggml_tensor*& of_each, ggml_tensor*& whole) const;
    void load_gate();
    void load_sinks();
    void load_keys();
    void load_values();
    void load_norms();
    void load_experts();
    void load_beside_experts();
    void load_ffn();

    const FileTensors& tensors_;
    const HParams& h_;
    const int il_;
    const HeadShape& heads_;
    const LayerCacheSpec& spec_;
    const int64_t wq_;  // of all queries
    const int64_t n_ff_;
    const bool attends_;
    const bool has_experts_;
    const std::string blk_;
    LayerWeights l_;
};

// Q, K and V, apart or packed, with their biases and norms, and what follows attention.
void Loader::load_projections() {
    const int64_t d = h_.n_embd;
    const int64_t w = heads_.width();
    const int64_t wq = wq_;
    const int64_t made = h_.block.output_gate ? 2 * wq : wq;  // by attn_q
    l_.attn_qkv = h_.block.output_gate ? nullptr : optional("attn_qkv.weight", {d, wq + 2 * w});
    l_.attn_qkv_bias = optional("attn_qkv.bias", {wq + 2 * w});
    if (l_.attn_qkv == nullptr) {
        l_.attn_q = need("attn_q.weight", {d, made});
        l_.attn_k = spec_.has_rows() && (is_full_key() || spec_.k.encoded) ? need("attn_k.weight", {d, w}) : nullptr;
        if (spec_.has_rows() && (spec_.v_path == VPath::full || spec_.v.encoded)) load_value_projection();
    } else if (!is_full_key() || spec_.v_path != VPath::full) {
        fail("gguf", "expected ", blk_, "attn_q.weight beside latent K or V; got packed ", blk_, "attn_qkv.weight");
    }
    l_.attn_q_bias = optional("attn_q.bias", {made});
    l_.attn_k_bias = optional("attn_k.bias", {w});
    l_.attn_v_bias = optional("attn_v.bias", {w});
    if (h_.block.value_norm && spec_.v_path == VPath::full && l_.attn_v_bias != nullptr) {
        fail("gguf", "expected no bias of V before its norm; got a tensor ", blk_, "attn_v.bias");
    }
    if (l_.value_of_key && (is_full_key() || spec_.key_of_value()) && l_.attn_k_bias != nullptr) {
        fail("gguf", "expected no bias of K, of which V is made; got a tensor ", blk_, "attn_k.bias");
    }
    load_gate();
    load_head_norm("attn_q_norm.weight", heads_.n_head, l_.attn_q_norm, l_.attn_q_norm_whole);
    load_head_norm("attn_k_norm.weight", heads_.n_kv, l_.attn_k_norm, l_.attn_k_norm_whole);
    if (h_.block.norm_after_rope && (l_.attn_q_norm == nullptr || l_.attn_k_norm == nullptr)) {
        fail("gguf", "expected norms of ", heads_.head_dim, " numbers after RoPE, ", blk_, "attn_q_norm.weight and ",
             blk_, "attn_k_norm.weight; got none, or one over all heads");
    }
    l_.attn_output = need("attn_output.weight", {wq, d});
    l_.attn_output_bias = optional("attn_output.bias", {d});
}

void Loader::load_mla() {
    l_.mla = lkv::load_mla(tensors_, h_.mla, h_.n_embd, h_.n_head, spec_.mla_rank(), blk_);
    l_.attn_output = need("attn_output.weight", {int64_t{h_.n_head} * h_.mla.n_value, h_.n_embd});
    l_.attn_output_bias = optional("attn_output.bias", {h_.n_embd});
    if (spec_.v_path != VPath::latent) return;
    l_.attn_v_e = need("attn_v_e.weight", {h_.mla.kv_rank, spec_.mla_rank()});
    l_.attn_v_e_bias = optional("attn_v_e.bias", {h_.mla.kv_rank});
}

void Loader::load_value_projection() {
    const int64_t d = h_.n_embd;
    const int64_t w = heads_.width();
    l_.value_of_key = h_.block.value_of_key && tensors_.find(blk_ + "attn_v.weight") == nullptr;
    if (!l_.value_of_key) {
        l_.attn_v = need("attn_v.weight", {d, w});
    } else if (l_.attn_k == nullptr) {
        fail("gguf", "expected a tensor ", blk_, "attn_k.weight, of which V is made; got none");
    }
}

// A weight as wide as one head is every head's norm, one as wide as all of them theirs together.
void Loader::load_head_norm(const char* role, int64_t n_heads, ggml_tensor*& of_each, ggml_tensor*& whole) const {
    const ggml_tensor* const found = tensors_.find(blk_ + role);
    const int64_t width = n_heads * heads_.head_dim;
    if (found != nullptr && n_heads > 1 && found->ne[0] == width) {
        whole = need(role, {width});
    } else {
        of_each = optional(role, {heads_.head_dim});
    }
}

// A gate for every head, or for each of its numbers.
void Loader::load_gate() {
    if (h_.block.gate == Gate::none) return;
    const ggml_tensor* const found = tensors_.find(blk_ + "attn_gate.weight");
    const bool of_heads = found != nullptr && found->ne[1] == heads_.n_head;
    l_.attn_gate = need("attn_gate.weight", {h_.n_embd, of_heads ? heads_.n_head : wq_});
}

void Loader::load_sinks() {
    l_.attn_sinks = optional("attn_sinks.weight", {heads_.n_head});
    if (l_.attn_sinks == nullptr) return;
    l_.sinks = to_floats(l_.attn_sinks);
    if (spec_.v_path == VPath::latent && l_.attn_v_bias != nullptr) {
        l_.sink_values = to_floats(l_.attn_v_bias);
        for (float& x : l_.sink_values) x = -x;
    }
}

// Factors of K: A or E makes its latents, B rebuilds keys, E_q takes queries to the latents.
void Loader::load_keys() {
    if (!spec_.has_rows()) return;
    if (spec_.key_of_value()) {
        if (!l_.value_of_key || l_.attn_k_norm == nullptr) {
            fail("gguf", "expected ", blk_, "attn_k_norm.weight and no ", blk_,
                 "attn_v.weight beside keys of the rows of V; got others");
        }
        l_.k_norm = to_floats(l_.attn_k_norm);
        if (l_.attn_v_bias != nullptr) l_.k_bias = to_floats(l_.attn_v_bias);
        return;
    }
    const int64_t rank = spec_.k.rank_max();
    const int64_t w = heads_.width();
    if (spec_.k_path == KPath::rotated || spec_.k.encoded) {
        l_.attn_k_e =
            need("attn_k_e.weight", {static_cast<int64_t>(spec_.k.group) * heads_.head_dim, spec_.k.rank_sum()});
        if (spec_.k_path != KPath::rotated) l_.attn_k_e_bias = optional("attn_k_e.bias", {w});
    } else if (spec_.k_path != KPath::full) {
        if (l_.attn_k_norm_whole != nullptr) {
            fail("gguf", "expected ", blk_, "attn_k_e.weight, latents of K after its norm over all heads; got none");
        }
        l_.attn_k_a = need("attn_k_a.weight", {h_.n_embd, spec_.k.rank_sum()});
        l_.attn_k_a_bias = optional("attn_k_a.bias", {spec_.k.rank_sum()});
    }
    if (spec_.k_path == KPath::rebuild) {
        l_.attn_k_b = need("attn_k_b.weight", {rank, w});
        l_.k_b = by_channel(l_.attn_k_b, heads_.n_kv, heads_.head_dim);
        if (l_.attn_k_bias != nullptr) l_.k_bias = to_floats(l_.attn_k_bias);
        if (l_.attn_k_norm != nullptr) l_.k_norm = to_floats(l_.attn_k_norm);
        if (h_.block.norm_after_rope) std::ranges::fill(l_.k_norm, 1.0F);  // queries have it, see Projections::heads
    }
    if (spec_.k_path == KPath::rotated || spec_.k_path == KPath::absorbed) {
        l_.attn_q_e = need("attn_q_e.weight", {heads_.head_dim, rank, heads_.n_kv});
    }
}

void Loader::load_values() {
    if (!spec_.has_rows() || spec_.v_path != VPath::latent) return;
    const int64_t w = heads_.width();
    if (spec_.v.encoded) {
        l_.attn_v_e =
            need("attn_v_e.weight", {static_cast<int64_t>(spec_.v.group) * heads_.head_dim, spec_.v.rank_sum()});
        l_.attn_v_e_bias = optional("attn_v_e.bias", {w});
    } else {
        if (h_.block.value_norm) {
            fail("gguf", "expected ", blk_, "attn_v_e.weight, latents of V after its norm; got none");
        }
        l_.attn_v_a = need("attn_v_a.weight", {h_.n_embd, spec_.v.rank_sum()});
        l_.attn_v_a_bias = optional("attn_v_a.bias", {spec_.v.rank_sum()});
    }
    l_.attn_v_b = need("attn_v_b.weight", {spec_.v.rank_max(), w});
    l_.v_b = by_channel(l_.attn_v_b, heads_.n_kv, heads_.head_dim);
}

void Loader::load_norms() {
    const int64_t d = h_.n_embd;
    l_.attn_post_norm = optional("post_attention_norm.weight", {d});
    l_.ffn_post_norm = optional("post_ffw_norm.weight", {d});
    if (h_.n_embd_layer > 0) {
        l_.token_gate = need("inp_gate.weight", {d, h_.n_embd_layer});
        l_.token_proj = need("proj.weight", {h_.n_embd_layer, d});
        l_.token_norm = need("post_norm.weight", {d});
    }
    l_.output_scale = optional("layer_output_scale.weight", {1});
    l_.attn_norm = l_.attn_post_norm == nullptr ? need("attn_norm.weight", {d}) : optional("attn_norm.weight", {d});
    l_.attn_norm_bias = optional("attn_norm.bias", {d});
    l_.attn_norm_2 = optional("attn_norm_2.weight", {d});
    l_.attn_norm_2_bias = optional("attn_norm_2.bias", {d});
    l_.ffn_norm = optional("ffn_norm.weight", {d});
    l_.ffn_norm_bias = optional("ffn_norm.bias", {d});
    if (!h_.feeds(il_)) return;
    // a branch has a norm: this one is the FFN's under another name
    if (h_.mixer(il_) == Mixer::none && l_.ffn_norm == nullptr) std::swap(l_.ffn_norm, l_.attn_norm);
    if (l_.ffn_norm == nullptr && l_.ffn_post_norm == nullptr && l_.attn_norm != nullptr) {
        std::swap(l_.ffn_norm, l_.attn_post_norm);
    }
    if (l_.ffn_norm == nullptr && l_.ffn_post_norm == nullptr && !h_.block.parallel) {
        fail("gguf", "expected a tensor ", blk_, "ffn_norm.weight; got none");
    }
}

void Loader::load_experts() {
    const int64_t d = h_.n_embd;
    const int64_t ff = h_.n_ff;
    const int64_t n = h_.n_expert;
    const int64_t read = h_.n_embd_expert;
    if (read != d) {
        l_.experts_in = need("ffn_latent_down.weight", {d, read});
        l_.experts_out = need("ffn_latent_up.weight", {read, d});
    }
    l_.ffn_gate_inp = need("ffn_gate_inp.weight", {d, n});
    l_.ffn_gate_inp_bias = optional("ffn_gate_inp.bias", {n});
    l_.expert_bias = optional("exp_probs_b.bias", {n});
    const bool is_plain = h_.block.ffn == Ffn::plain_experts;
    l_.ffn_up = optional("ffn_gate_up_exps.weight", {read, 2 * ff, n});
    if (is_plain) {
        l_.ffn_up = need("ffn_up_exps.weight", {read, ff, n});
    } else if (l_.ffn_up == nullptr) {
        l_.ffn_gate = need("ffn_gate_exps.weight", {read, ff, n});
        l_.ffn_gate_bias = optional("ffn_gate_exps.bias", {ff, n});
        l_.ffn_up = need("ffn_up_exps.weight", {read, ff, n});
        l_.ffn_up_bias = optional("ffn_up_exps.bias", {ff, n});
    } else if (h_.block.activation == Activation::swiglu_oai) {
        fail("gguf", "expected a tensor ", blk_, "ffn_gate_exps.weight; got none");
    }
    l_.ffn_down = need("ffn_down_exps.weight", {ff, read, n});
    l_.ffn_down_bias = optional("ffn_down_exps.bias", {read, n});
    if (tensors_.find(blk_ + "ffn_up_shexp.weight") == nullptr) return;
    const int64_t shared = h_.n_ff_shared;
    l_.shared_gate_inp = optional("ffn_gate_inp_shexp.weight", {d});
    if (!is_plain) l_.shared_gate = need("ffn_gate_shexp.weight", {d, shared});
    l_.shared_up = need("ffn_up_shexp.weight", {d, shared});
    l_.shared_down = need("ffn_down_shexp.weight", {shared, d});
}

// The dense FFN, the norms of both, and the router's own scales.
void Loader::load_beside_experts() {
    const int64_t d = h_.n_embd;
    const int64_t ff = h_.n_ff_dense;
    l_.dense_gate = need("ffn_gate.weight", {d, ff});
    l_.dense_up = need("ffn_up.weight", {d, ff});
    l_.dense_down = need("ffn_down.weight", {ff, d});
    l_.dense_post_norm = need("post_ffw_norm_1.weight", {d});
    l_.experts_norm = need("pre_ffw_norm_2.weight", {d});
    l_.experts_post_norm = need("post_ffw_norm_2.weight", {d});
    l_.router_scale = need("ffn_gate_inp.scale", {d});
    l_.expert_scale = optional("ffn_down_exps.scale", {h_.n_expert});
}

void Loader::load_ffn() {
    const int64_t d = h_.n_embd;
    const int64_t ff = n_ff_;
    const bool is_gated = h_.block.ffn != Ffn::plain;
    const bool packed_up = is_gated && tensors_.find(blk_ + "ffn_gate.weight") == nullptr;
    if (packed_up && h_.block.activation == Activation::swiglu_oai) {
        fail("gguf", "expected a tensor ", blk_, "ffn_gate.weight; got none");
    }
    if (is_gated && !packed_up) {
        l_.ffn_gate = need("ffn_gate.weight", {d, ff});
        l_.ffn_gate_bias = optional("ffn_gate.bias", {ff});
    }
    const int64_t up = packed_up ? 2 * ff : ff;
    l_.ffn_up = need("ffn_up.weight", {d, up});
    l_.ffn_up_bias = optional("ffn_up.bias", {up});
    l_.ffn_down = need("ffn_down.weight", {ff, d});
    l_.ffn_down_bias = optional("ffn_down.bias", {d});
}

}  // namespace

LayerWeights load_layer(const FileTensors& tensors, const HParams& hparams, const LayerCacheSpec& spec, int il) {
    return Loader(tensors, hparams, spec, il).load();
}

size_t factor_bytes(const LayerWeights& l) {
    size_t bytes = 0;
    for (const ggml_tensor* factor : {l.attn_k_a, l.attn_k_a_bias, l.attn_k_b, l.attn_k_e, l.attn_k_e_bias, l.attn_q_e,
                                      l.attn_v_a, l.attn_v_a_bias, l.attn_v_b, l.attn_v_e, l.attn_v_e_bias}) {
        bytes += factor == nullptr ? 0 : ggml_nbytes(factor);
    }
    return bytes;
}

}  // namespace lkv
