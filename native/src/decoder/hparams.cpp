#include "decoder/hparams.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "decoder/number.h"
#include "decoder/rope.h"

namespace lkv {
float read_float(const GgufFile& file, const std::string& key, float low, float high, float absent) {
    const auto found = file.find_f32(key);
    if (found && !(*found >= low && *found <= high)) {
        fail(key, "expected a number from ", low, " to ", high, "; got ", *found);
    }
    return found.value_or(absent);
}

namespace {

bool is_per_layer(const GgufFile& file, const std::string& key, int n_layer) {
    const GgufValue* const found = file.find(key);
    return n_layer > 0 && found != nullptr && found->is_array;
}

std::vector<uint32_t> one_a_layer(const GgufFile& file, const std::string& key, int n_layer) {
    std::vector<uint32_t> values = file.get_u32_array(key);
    const uint32_t n_mtp = file.find_u32(key.substr(0, key.find('.')) + ".nextn_predict_layers").value_or(0);
    if (values.size() == static_cast<size_t>(n_layer) + n_mtp) values.resize(static_cast<size_t>(n_layer));
    if (values.size() != static_cast<size_t>(n_layer)) {
        fail(key, "expected one number, or ", n_layer, ", one a layer; got ", values.size());
    }
    return values;
}

}  // namespace

std::optional<uint32_t> find_layer_u32(const GgufFile& file, const std::string& key, int n_layer, int il) {
    if (!is_per_layer(file, key, n_layer)) return file.find_u32(key);
    return one_a_layer(file, key, n_layer)[static_cast<size_t>(il)];
}

std::optional<uint32_t> find_layers_u32(const GgufFile& file, const std::string& key, int n_layer) {
    if (!is_per_layer(file, key, n_layer)) return file.find_u32(key);
    const std::vector<uint32_t> values = one_a_layer(file, key, n_layer);
    const auto other = std::find_if(values.begin(), values.end(), [&](uint32_t v) { return v != values.front(); });
    if (other != values.end()) {
        fail(key, "expected the same number for every layer; got ", values.front(), " and, in layer ",
             other - values.begin(), ", ", *other);
    }
    return values.front();
}

namespace {

// K and V of every layer. Layers with a sliding window have keys of their own, where a file has these.
std::vector<HeadShape> read_heads(const GgufFile& file, const HParams& h) {
    const std::string dot = h.architecture + ".";
    if (h.has_mla()) {  // one head, whose values are in its key's row
        return {static_cast<size_t>(h.n_layer), HeadShape{1, static_cast<int>(h.mla.row()), h.mla.n_rot, h.n_head}};
    }
    std::vector<HeadShape> heads;
    for (int il = 0; il < h.n_layer; il++) {
        const bool is_local = h.block.layers[static_cast<size_t>(il)].window > 0;
        // in this layer, and the key that says so
        const auto find = [&](const std::string& name) -> std::pair<std::optional<uint32_t>, std::string> {
            const std::string local = dot + name + "_swa";
            const std::string key = is_local && file.has(local) ? local : dot + name;
            return {find_layer_u32(file, key, h.n_layer, il), key};
        };
        const auto within = [&](const std::string& name, int64_t low, int64_t high, int64_t absent) {
            const auto [found, key] = find(name);
            return check_within(key, found ? int64_t{*found} : absent, low, high);
        };
        if (!h.attends(il)) {  // keys may say that it has no heads
            heads.emplace_back();
            continue;
        }
        HeadShape shape;
        shape.n_head = within("attention.head_count", 1, 4096, 0);
        shape.n_kv = within("attention.head_count_kv", 1, 4096, shape.n_head);
        if (shape.n_head % shape.n_kv != 0) {
            fail(dot + "attention.head_count_kv", "expected a divisor of the query heads ", shape.n_head, "; got ",
                 shape.n_kv);
        }
        if (find("attention.key_length").first) {
            shape.head_dim = within("attention.key_length", 1, 4096, 0);
            if (const auto [value_length, key] = find("attention.value_length");
                value_length && static_cast<int>(*value_length) != shape.head_dim) {
                fail(key, "expected the key length ", shape.head_dim, "; got ", *value_length);
            }
        } else {
            if (h.n_embd % shape.n_head != 0) {
                fail("gguf", "expected the key " + dot + "attention.key_length", "; got ", "none");
            }
            shape.head_dim = h.n_embd / shape.n_head;
        }
        shape.n_rot = within("rope.dimension_count", 2, shape.head_dim, shape.head_dim);
        if (h.block.position == Position::rope && shape.n_rot % 2 != 0) {
            fail(find("rope.dimension_count").second, "expected an even number", "; got ", shape.n_rot);
        }
        heads.push_back(shape);
        if (shape != heads[static_cast<size_t>(h.rows_of(il))]) {
            fail(dot + "attention.shared_kv_layers", "expected KV heads of layer ", il, " as in layer ", h.rows_of(il),
                 ", whose K and V it reads; got ", shape.n_kv, " of ", shape.head_dim);
        }
    }
    const auto attends = std::find_if(heads.begin(), heads.end(), [](const HeadShape& s) { return s.n_kv > 0; });
    if (attends == heads.end()) fail(dot + "attention.head_count_kv", "expected a layer that attends; got none");
    std::replace(heads.begin(), heads.end(), HeadShape(), HeadShape(*attends));
    return heads;
}

Recurrence read_recurrence(const GgufFile& file, const HParams& h, Mixer mixer) {
    if (mixer == Mixer::delta_net) return read_delta_net(file, h.architecture);
    if (mixer == Mixer::short_conv) return read_short_conv(file, h.architecture, h.n_embd);
    return read_mamba2(file, h.architecture);
}

std::optional<Recurrence> read_recurrence(const GgufFile& file, const HParams& h) {
    std::optional<Mixer> kind;
    for (int il = 0; il < h.n_layer; il++) {
        if (!h.recurs(il)) continue;
        if (kind.value_or(h.mixer(il)) != h.mixer(il)) {
            const auto name = [](Mixer mixer) { return schema::mixer_words[static_cast<size_t>(mixer)]; };
            fail(key::block_mixers, "expected recurrent layers of one kind; got ", name(*kind), " and ",
                 name(h.mixer(il)));
        }
        kind = h.mixer(il);
    }
    return kind ? std::optional(read_recurrence(file, h, *kind)) : std::nullopt;
}

// The default for files that do not say it. usual: without experts.
int expert_width(const GgufFile& file, int usual) {
    for (const TensorInfo& info : file.tensors()) {
        if (info.n_dims == 3 && info.name.ends_with(".ffn_up_exps.weight")) return static_cast<int>(info.ne[1]);
    }
    return usual;
}

bool has_expert_bias(const GgufFile& file) {
    return std::any_of(file.tensors().begin(), file.tensors().end(),
                       [](const TensorInfo& info) { return info.name.ends_with(".exp_probs_b.bias"); });
}

// Numbers under `<architecture>.*`, where layers must not differ.
class StockKeys {
public:
    StockKeys(const GgufFile& file, const HParams& h) : file_(file), h_(h), dot_(h.architecture + ".") {}

    const GgufFile& file() const { return file_; }
    std::string operator()(const std::string& name) const { return dot_ + name; }
    bool has(const std::string& name) const { return find_layers_u32(file_, dot_ + name, h_.n_layer).has_value(); }
    // Errors: Error for a missing key, or a number that is not from `low` to `high`.
    int need(const std::string& name, int64_t low, int64_t high) const {
        const auto found = find_layers_u32(file_, dot_ + name, h_.n_layer);
        return check_within(dot_ + name, found ? *found : file_.get_u32(dot_ + name), low, high);
    }
    int find(const std::string& name, int64_t low, int64_t high, int absent) const {
        return has(name) ? need(name, low, high) : absent;
    }
    float number(const std::string& name, float low, float high, float absent) const {
        return read_float(file_, dot_ + name, low, high, absent);
    }

private:
    const GgufFile& file_;
    const HParams& h_;
    const std::string dot_;
};

constexpr const char* expert_ff = "expert_feed_forward_length";

void read_layer_count(const StockKeys& keys, HParams& h) {
    h.n_layer = keys.need("block_count", 1, 4096);
    const std::string mtp = keys("nextn_predict_layers");
    const uint32_t n = keys.file().find_u32(mtp).value_or(0);
    if (n >= static_cast<uint32_t>(h.n_layer)) {
        fail(mtp, "expected fewer than the layers ", h.n_layer, "; got ", n);
    }
    h.n_mtp = static_cast<int>(n);
    h.n_layer -= h.n_mtp;
}

// Widths of FFNs without experts; none if all layers have experts.
void read_ffn_widths(const StockKeys& keys, HParams& h) {
    const std::string key = keys("feed_forward_length");
    const uint32_t least = is_per_layer(keys.file(), key, h.n_layer) ? 0 : 1;  // 0: the layer has no FFN
    for (int il = 0; il < h.n_layer; il++) {
        const auto width = find_layer_u32(keys.file(), key, h.n_layer, il);
        if (!width && keys.has(expert_ff)) break;
        if (!width || *width < least || *width > 1U << 22) {
            fail(key, "expected a value from ", least, " to ", 1 << 22, "; got ", width.value_or(0));
        }
        h.n_ffs.push_back(static_cast<int>(*width));
    }
    h.n_ff = h.n_ffs.empty() ? 0 : *std::max_element(h.n_ffs.begin(), h.n_ffs.end());
}

void read_head_count(const StockKeys& keys, HParams& h) {
    const std::string key = keys("attention.head_count");
    for (int il = 0; il < h.n_layer; il++) {
        const int64_t n = find_layer_u32(keys.file(), key, h.n_layer, il).value_or(0);
        if (n < 1 || n > 4096) fail(key, "expected a value from 1 to 4096; got ", n);
        h.n_head = std::max(h.n_head, static_cast<int>(n));
    }
}

void check_mixers(const StockKeys& keys, const HParams& h) {
    for (int il = 0; il < h.n_layer; il++) {
        if (h.mixer(il) != Mixer::none || h.feeds(il)) continue;
        fail(keys("feed_forward_length"), "expected an FFN in layer ", il, ", which mixes no tokens; got none");
    }
    if (h.has_mla() && (h.block.position != Position::rope || h.block.output_gate || h.is_mixed())) {
        fail(keys("attention.kv_lora_rank"), "expected attention with RoPE and without an output gate in every layer, ",
             "beside MLA; got a block of another kind");
    }
}

void read_experts(const StockKeys& keys, HParams& h) {
    const GgufFile& file = keys.file();
    const bool has_both = h.block.ffn == Ffn::gated_and_experts;
    if (!has_only_experts(h.block.ffn) && !has_both) {
        if (const uint32_t n = file.find_u32(keys("expert_count")).value_or(0); n > 0) {
            fail(keys("expert_count"), "expected 0 beside an FFN without experts; got ", n);
        }
        return;
    }
    const int n_ff = h.n_ff;
    h.n_ff_dense = has_both ? n_ff : 0;
    h.n_expert = keys.need("expert_count", 2, 4096);
    h.n_expert_used = keys.need("expert_used_count", 1, h.n_expert);
    const int narrow = keys.find("moe_latent_size", 0, 1 << 20, 0);
    h.n_embd_expert = narrow > 0 ? narrow : h.n_embd;
    h.n_ff = keys.find(expert_ff, 1, 1 << 22, expert_width(file, n_ff));
    const int n_shared = keys.find("expert_shared_count", 0, 256, -1);
    const int shared = n_shared >= 0 ? n_shared * h.n_ff : n_ff;
    h.n_ff_shared = keys.find("expert_shared_feed_forward_length", 0, 1 << 22, shared);
    h.n_dense_layers = keys.find("leading_dense_block_count", 0, h.n_layer, 0);
    if (h.n_dense_layers > 0 && h.n_ffs.empty()) {
        fail(keys("feed_forward_length"), "expected the width of the FFNs without experts; got none");
    }
    h.routing = read_routing(file, h.architecture, h.n_expert, has_expert_bias(file) && !h.block.softmax_beside_bias);
}

void read_attention_numbers(const StockKeys& keys, HParams& h) {
    h.temperature_scale = keys.number("attention.temperature_scale", 0.0F, 1e3F, 0.0F);
    if (h.temperature_scale > 0.0F) {
        const char* const own = "attention.temperature_length";
        h.temperature_length = keys.need(keys.has(own) ? own : "rope.scaling.original_context_length", 1, 1 << 30);
    }
    h.clamp_kqv = keys.number("attention.clamp_kqv", 0.0F, 1e6F, 0.0F);
    const float bias = keys.number("attention.max_alibi_bias", 0.0F, 1e6F, 0.0F);
    if (h.block.position != Position::alibi) return;
    if (bias <= 0.0F) {
        fail(keys("attention.max_alibi_bias"), "expected a positive number for position alibi", "; got ", bias);
    }
    h.max_alibi_bias = bias;
}

int read_vocabulary_size(const GgufFile& file, const HParams& h) {
    const TensorInfo* const embedding = file.find_tensor("token_embd.weight");
    if (embedding == nullptr || embedding->n_dims != 2 || embedding->ne[0] != h.n_embd) {
        fail("gguf", "expected a tensor token_embd.weight of width ", h.n_embd, "; got ",
             embedding == nullptr ? std::string("none") : std::to_string(embedding->ne[0]));
    }
    return static_cast<int>(embedding->ne[1]);
}

}  // namespace

float HParams::temperature(int position) const {
    return 1.0F + temperature_scale * std::log(1.0F + static_cast<float>(position / temperature_length));
}

float HParams::attention_scale(int il) const {
    return block.attention_scale != 0.0F ? block.attention_scale
                                         : 1.0F / std::sqrt(static_cast<float>(heads_of(il).head_dim));
}

HParams read_hparams(const GgufFile& file) {
    HParams h;
    h.architecture = file.get_string("general.architecture");
    check_architecture(file, h.architecture);  // before its keys are missed
    const StockKeys keys(file, h);
    if (!file.find_bool(keys("attention.causal")).value_or(true)) {
        fail(keys("attention.causal"), "expected true: tokens see those before them; got false (an embedding model, ",
             "whose tokens see later ones too)");
    }
    read_layer_count(keys, h);
    h.n_embd = keys.need("embedding_length", 1, 1 << 20);
    read_ffn_widths(keys, h);
    h.n_embd_layer = keys.find("embedding_length_per_layer_input", 0, 1 << 16, 0);
    read_head_count(keys, h);
    h.n_ctx_train = keys.need("context_length", 1, 1 << 30);
    h.block = read_block(file, h);
    h.mla = read_mla(file, h.architecture);
    check_mixers(keys, h);
    h.heads = read_heads(file, h);
    if (h.has_mla() && h.block.attention_scale == 0.0F) h.block.attention_scale = read_mla_scale(file, h);
    read_experts(keys, h);
    h.recurrence = read_recurrence(file, h);
    const char* const epsilon =
        h.block.norm == Norm::rms ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon";
    h.norm_eps = keys.number(epsilon, 0.0F, 1.0F, 1e-5F);
    read_attention_numbers(keys, h);
    h.n_vocab = read_vocabulary_size(file, h);
    return h;
}

}  // namespace lkv
