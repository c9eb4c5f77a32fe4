#include "decoder/block.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>

#include "base/error.h"
#include "decoder/hparams.h"
#include "decoder/word.h"

namespace lkv {
namespace {

constexpr uint32_t widest_window = 1U << 30;
constexpr float largest_base = 1e15F;
constexpr float largest_scale = 1e6F;

void read(const GgufFile& file, std::string_view key, bool& field) { field = file.get_bool(key); }

// A factor, or a cap or an epsilon, which may be 0.
void read(const GgufFile& file, std::string_view key, float& field) {
    const bool is_epsilon = key.ends_with("epsilon");
    const float least = is_epsilon || key.ends_with("softcap") ? 0.0F : 1.0F / largest_scale;
    field = read_float(file, std::string(key), least, is_epsilon ? 1.0F : largest_scale, field);
}

template <typename Enum, size_t n>
void read(const GgufFile& file, std::string_view key, Enum& field, const std::array<std::string_view, n>& words) {
    field = parse_word<Enum>(key, file.get_string(key), words);
}

// Null: none.
const schema::StockBlock* find_stock_block(const std::string& architecture) {
    const auto found =
        std::find_if(schema::stock_blocks.begin(), schema::stock_blocks.end(),
                     [&](const schema::StockBlock& stock) { return architecture == stock.architecture; });
    return found == schema::stock_blocks.end() ? nullptr : &*found;
}

const schema::StockBlock& stock_block(const GgufFile& file, const std::string& architecture) {
    for (const std::string_view key : key::all) {
        if (key.starts_with("latentkv.block.") && file.has(key)) {
            fail(key, "expected ", key::block_norm, " beside it; got none");
        }
    }
    if (const schema::StockBlock* const found = find_stock_block(architecture)) return *found;
    std::string known;
    for (const schema::StockBlock& stock : schema::stock_blocks) {
        known += (known.empty() ? "" : ", ") + std::string(stock.architecture);
    }
    fail("gguf", "expected latentkv.block.* keys or a general.architecture of ", known, "; got ", quoted(architecture));
}

// A value for every layer; nothing without the key.
template <typename T>
std::vector<T> per_layer(std::string_view key, std::optional<std::vector<T>> found, int n_layer) {
    if (!found) return {};
    if (found->size() != static_cast<size_t>(n_layer)) {
        fail(key, "expected ", n_layer, " values, one a layer; got ", found->size());
    }
    return *std::move(found);
}

// Every layer as the stock keys have it.
std::vector<LayerAttention> uniform_layers(const GgufFile& file, const HParams& h, Position position) {
    const std::string dot = h.architecture + ".";
    LayerAttention layer;
    const uint32_t window = find_layers_u32(file, dot + "attention.sliding_window", h.n_layer).value_or(0);
    layer.window = static_cast<int>(std::min(window, widest_window));
    if (position == Position::rope) {
        layer.rope_base = read_float(file, dot + "rope.freq_base", 1.0F, largest_base, 10000.0F);
    }
    return std::vector(static_cast<size_t>(h.n_layer), layer);
}

void mix(LayerAttention& layer, Mixer mixer) {
    layer.mixer = mixer;
    if (mixer != Mixer::attention) layer.window = 0;
}

void read_mixers(const GgufFile& file, const HParams& h, BlockDescription& block) {
    const auto words = per_layer(key::block_mixers, file.find_string_array(key::block_mixers), h.n_layer);
    for (size_t il = 0; il < words.size(); il++) {
        mix(block.layers[il], parse_word<Mixer>(key::block_mixers, words[il], schema::mixer_words));
    }
}

void read_layers(const GgufFile& file, const HParams& h, BlockDescription& block) {
    block.layers = uniform_layers(file, h, block.position);
    const auto windows = per_layer(key::block_windows, file.find_u32_array(key::block_windows), h.n_layer);
    const auto bases = per_layer(key::block_rope_bases, file.find_f32_array(key::block_rope_bases), h.n_layer);
    const auto scaled = per_layer(key::block_rope_scaled, file.find_bool_array(key::block_rope_scaled), h.n_layer);
    if (block.position != Position::rope && !(bases.empty() && scaled.empty())) {
        fail(bases.empty() ? key::block_rope_scaled : key::block_rope_bases, "expected position rope; got another");
    }
    for (size_t il = 0; il < block.layers.size(); il++) {
        LayerAttention& layer = block.layers[il];
        if (!windows.empty()) layer.window = static_cast<int>(std::min(windows[il], widest_window));
        if (!scaled.empty()) layer.rope_scaled = scaled[il];
        if (bases.empty()) continue;
        layer.rope_base = bases[il];
        if (layer.rope_base != 0.0F && !(layer.rope_base >= 1.0F && layer.rope_base <= largest_base)) {
            fail(key::block_rope_bases, "expected 0 or numbers from 1 to ", largest_base, "; got ", layer.rope_base);
        }
    }
}

// The last layers have no K and V: each reads those of the last layer before them that is of its kind, with a window or without.
void share_rows(const GgufFile& file, const HParams& h, BlockDescription& block) {
    const std::string key = h.architecture + ".attention.shared_kv_layers";
    const uint32_t n = file.find_u32(key).value_or(0);
    if (n >= static_cast<uint32_t>(h.n_layer)) {
        fail(key, "expected fewer than the layers ", h.n_layer, "; got ", n);
    }
    const int first = h.n_layer - static_cast<int>(n);
    for (int il = first; il < h.n_layer; il++) {
        LayerAttention& layer = block.layers[static_cast<size_t>(il)];
        for (int from = first - 1; from >= 0 && layer.rows_of < 0; from--) {
            if (block.layers[static_cast<size_t>(from)].window == layer.window) layer.rows_of = from;
        }
        if (layer.rows_of < 0) {
            fail(key, "expected a layer of the same window before layer ", il, ", which shares K and V; got none");
        }
    }
}

BlockDescription described(const GgufFile& file, const HParams& h) {
    BlockDescription block;
    schema::each_word(block, [&](auto key, auto& field, const auto&... words) { read(file, key, field, words...); });
    schema::each_option(block, [&](auto key, auto& field, const auto&... words) {
        if (file.has(key)) read(file, key, field, words...);
    });
    const bool is_plain = block.ffn == Ffn::plain || block.ffn == Ffn::plain_experts;
    if (block.activation == Activation::swiglu_oai && is_plain) {
        fail(key::block_activation, "expected swiglu_oai in a gated FFN; got a plain one");
    }
    if (block.activation == Activation::relu2 && !is_plain) {
        fail(key::block_activation, "expected relu2 in a plain FFN; got a gated one");
    }
    read_layers(file, h, block);
    read_mixers(file, h, block);
    share_rows(file, h, block);
    return block;
}

// Layers that do not attend: all but every n-th, or those of a list, which may include extra layers after the decoder's.
void mix_by_recurrence(const GgufFile& file, const HParams& h, int stock_period, BlockDescription& block) {
    const std::string listed = h.architecture + ".attention.recurrent_layers";
    if (const auto recurrent = file.find_bool_array(listed)) {
        if (recurrent->size() < block.layers.size()) {
            fail(listed, "expected ", block.layers.size(), " values, one a layer; got ", recurrent->size());
        }
        for (size_t il = 0; il < block.layers.size(); il++) {
            if ((*recurrent)[il]) mix(block.layers[il], Mixer::delta_net);
        }
        return;
    }
    const auto usual = static_cast<uint32_t>(stock_period);
    const uint32_t period = file.find_u32(h.architecture + ".full_attention_interval").value_or(usual);
    for (size_t il = 0; period > 0 && il < block.layers.size(); il++) {
        if ((il + 1) % period != 0) mix(block.layers[il], Mixer::delta_net);
    }
}

// Layers without KV heads do not attend: they recur, or have an FFN alone where layers have one or the other.
void mix_by_heads(const GgufFile& file, const HParams& h, Mixer mixer, bool one_branch, BlockDescription& block) {
    const std::string key = h.architecture + ".attention.head_count_kv";
    for (int il = 0; il < h.n_layer; il++) {
        if (find_layer_u32(file, key, h.n_layer, il).value_or(1) > 0) continue;
        mix(block.layers[static_cast<size_t>(il)], one_branch && h.feeds(il) ? Mixer::none : mixer);
    }
}

// Which layers have a window: all but one of so many, the first or the last, or as a list of all layers says.
std::vector<bool> local_layers(const GgufFile& file, const HParams& h, int stock_period, bool first) {
    const std::string key = h.architecture + ".attention.sliding_window_pattern";
    const GgufValue* const found = file.find(key);
    if (found != nullptr && found->is_array) {
        return per_layer(key, file.find_bool_array(key), h.n_layer);
    }
    const auto usual = static_cast<uint32_t>(stock_period);
    const int period = static_cast<int>(std::clamp<uint32_t>(file.find_u32(key).value_or(usual), 1, 1U << 16));
    std::vector<bool> local;
    for (int il = 0; il < h.n_layer; il++) local.push_back((first ? il : il + 1) % period != 0);
    return local;
}

// Layers with a window have a RoPE base of their own, or the same unscaled; the others see all tokens.
void alternate(const GgufFile& file, const HParams& h, const schema::StockBlock& stock, BlockDescription& block) {
    const float base =
        read_float(file, h.architecture + ".rope.freq_base_swa", 1.0F, largest_base, stock.local_rope_base);
    const std::vector<bool> local = local_layers(file, h, stock.window_period, stock.first_is_full);
    for (size_t il = 0; il < local.size(); il++) {
        LayerAttention& layer = block.layers[il];
        if (!local[il]) {
            layer.window = 0;
            if (stock.full_unrotated) layer.rope_base = 0.0F;
            continue;
        }
        if (base > 0.0F) layer.rope_base = base;
        if (base > 0.0F || stock.local_unscaled) layer.rope_scaled = false;
    }
}

// 0 means none; logit_scale is what logits are divided by.
void read_stock_scales(const GgufFile& file, const std::string& dot, BlockDescription& block) {
    const auto read = [&](const char* name, float absent) {
        const float found = read_float(file, dot + name, 0.0F, largest_scale, 0.0F);
        return found > 0.0F ? found : absent;
    };
    block.embedding_scale = read("embedding_scale", block.embedding_scale);
    block.attention_scale = read("attention.scale", block.attention_scale);
    block.residual_scale = read("residual_scale", block.residual_scale);
    block.logit_scale = 1.0F / read("logit_scale", 1.0F);
}

// Layers without RoPE, as a list of all layers says.
void unrotate(const GgufFile& file, const HParams& h, BlockDescription& block) {
    const std::string key = h.architecture + ".attention.rope_pattern";
    const std::vector<bool> rotates = per_layer(key, file.find_bool_array(key), h.n_layer);
    for (size_t il = 0; il < rotates.size(); il++) {
        if (!rotates[il]) block.layers[il].rope_base = 0.0F;
    }
}

BlockDescription of_stock(const GgufFile& file, const HParams& h) {
    const schema::StockBlock& stock = stock_block(file, h.architecture);
    BlockDescription block{stock.block, {}, {}};
    const bool has_experts = file.find_u32(h.architecture + ".expert_count").value_or(0) > 0;
    if (block.ffn == Ffn::gated && stock.may_have_experts && has_experts) block.ffn = Ffn::experts;
    if (stock.experts_beside && has_experts) block.ffn = Ffn::gated_and_experts;
    if (!has_experts && file.has(h.architecture + ".leading_dense_block_count")) block.ffn = Ffn::gated;
    block.expert_norm = file.find_bool(h.architecture + ".expert_weights_norm").value_or(block.expert_norm);
    if (stock.stock_scales && !file.find_bool(h.architecture + ".rope.scaling.finetuned").value_or(true)) {
        block.position = Position::none;
    }
    if (stock.root_embedding) block.embedding_scale = std::sqrt(static_cast<float>(h.n_embd));
    if (h.n_layer == stock.wide_scale_layers) {
        block.attention_scale = 1.0F / std::sqrt(static_cast<float>(std::max(1, h.n_embd / h.n_head)));
    }
    block.attention_softcap = read_float(file, h.architecture + ".attn_logit_softcapping", 0.0F, largest_scale, 0.0F);
    block.logit_softcap = read_float(file, h.architecture + ".final_logit_softcapping", 0.0F, largest_scale, 0.0F);
    if (stock.stock_scales) read_stock_scales(file, h.architecture + ".", block);
    if (stock.logit_factor) {
        block.logit_scale =
            read_float(file, h.architecture + ".logit_scale", 1.0F / largest_scale, largest_scale, 1.0F);
    }
    block.layers = uniform_layers(file, h, block.position);
    for (int il = stock.rope_period - 1; stock.rope_period > 0 && il < h.n_layer; il += stock.rope_period) {
        block.layers[static_cast<size_t>(il)].rope_base = 0.0F;
    }
    if (stock.mixer_period > 0) mix_by_recurrence(file, h, stock.mixer_period, block);
    if (stock.mixer != Mixer::attention) mix_by_heads(file, h, stock.mixer, stock.one_branch, block);
    if (stock.window_period > 0 && block.layers.front().window > 0) alternate(file, h, stock, block);
    if (stock.rope_pattern) unrotate(file, h, block);
    share_rows(file, h, block);
    return block;
}

// Stock keys without an architecture, for files of ours too; one value each, or one a layer.
void read_xielu(const GgufFile& file, const HParams& h, BlockDescription& block) {
    if (block.activation != Activation::xielu) return;
    if (block.ffn != Ffn::plain) fail(key::block_activation, "expected xielu in a plain FFN; got another");
    const auto read = [&](const char* name) {
        const std::string key = std::string("xielu.") + name;
        if (const auto one = file.has(key) && !file.find(key)->is_array ? file.find_f32(key) : std::nullopt) {
            return std::vector<float>(static_cast<size_t>(h.n_layer), *one);
        }
        std::vector<float> values = per_layer(key, file.find_f32_array(key), h.n_layer);
        if (values.empty()) fail(key, "expected a number, or one a layer; got none");
        for (const float value : values) {
            if (!(std::abs(value) <= largest_scale))
                fail(key, "expected numbers up to ", largest_scale, "; got ", value);
        }
        return values;
    };
    const auto alpha_n = read("alpha_n"), alpha_p = read("alpha_p"), beta = read("beta"), eps = read("eps");
    for (size_t il = 0; il < alpha_n.size(); il++) {
        block.xielu.push_back({alpha_n[il], alpha_p[il], beta[il], eps[il]});
    }
}

}  // namespace

void check_architecture(const GgufFile& file, const std::string& architecture) {
    if (!file.has(key::block_norm)) stock_block(file, architecture);
}

BlockDescription read_block(const GgufFile& file, const HParams& sizes) {
    BlockDescription block = file.has(key::block_norm) ? described(file, sizes) : of_stock(file, sizes);
    read_xielu(file, sizes, block);
    const schema::StockBlock* const stock = find_stock_block(sizes.architecture);
    block.softmax_beside_bias = stock != nullptr && stock->softmax_beside_bias;
    return block;
}

}  // namespace lkv
