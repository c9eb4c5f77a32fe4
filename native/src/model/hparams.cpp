#include "model/hparams.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "base/error.h"

namespace lkv {
namespace {

template <typename Enum, size_t n>
Enum need_word(const GgufFile& file, std::string_view key, const std::array<std::string_view, n>& words) {
    const std::string_view word = file.get_string(key);
    const auto found = schema::parse<Enum>(words, word);
    if (!found) {
        fail(key, "expected a known word (docs/gguf.md); got ", quoted(word));
    }
    return *found;
}

BlockDescription read_block(const GgufFile& file, const std::string& architecture) {
    if (file.has(key::block_norm)) {
        return {
            .norm = need_word<Norm>(file, key::block_norm, schema::norm_words),
            .activation = need_word<Activation>(file, key::block_activation, schema::activation_words),
            .ffn = need_word<Ffn>(file, key::block_ffn, schema::ffn_words),
            .parallel = file.get_bool(key::block_parallel),
            .position = need_word<Position>(file, key::block_position, schema::position_words),
            .rope_pairing = need_word<RopePairing>(file, key::block_rope_pairing, schema::rope_pairing_words),
        };
    }
    std::string known;
    for (const schema::StockBlock& stock : schema::stock_blocks) {
        if (architecture == stock.architecture) {
            return {stock.norm, stock.activation, stock.ffn, stock.parallel, stock.position, stock.rope_pairing};
        }
        known += (known.empty() ? "" : ", ") + std::string(stock.architecture);
    }
    fail("gguf", "expected latentkv.block.* keys or a general.architecture of ", known, "; got ", quoted(architecture));
}

}  // namespace

float read_float(const GgufFile& file, const std::string& key, float low, float high, float absent) {
    const auto found = file.find_f32(key);
    if (found && !(*found >= low && *found <= high)) {
        fail(key, "expected a number from ", low, " to ", high, "; got ", *found);
    }
    return found.value_or(absent);
}

HParams read_hparams(const GgufFile& file) {
    HParams h;
    h.architecture = file.get_string("general.architecture");
    const std::string dot = h.architecture + ".";

    const auto need = [&](const std::string& name, int64_t low, int64_t high) {
        const int64_t value = file.get_u32(dot + name);
        if (value < low || value > high) {
            fail(dot + name, "expected a value from ", low, " to ", high, "; got ", value);
        }
        return static_cast<int>(value);
    };
    h.n_layer = need("block_count", 1, 4096);
    h.n_embd = need("embedding_length", 1, 1 << 20);
    h.n_ff = need("feed_forward_length", 1, 1 << 22);
    h.n_head = need("attention.head_count", 1, 4096);
    h.n_ctx_train = need("context_length", 1, 1 << 30);
    h.n_kv = file.find_u32(dot + "attention.head_count_kv") ? need("attention.head_count_kv", 1, 4096) : h.n_head;
    if (h.n_head % h.n_kv != 0) {
        fail(dot + "attention.head_count_kv", "expected a divisor of the query heads ", h.n_head, "; got ", h.n_kv);
    }
    if (const auto key_length = file.find_u32(dot + "attention.key_length")) {
        h.head_dim = need("attention.key_length", 1, 4096);
        if (const auto value_length = file.find_u32(dot + "attention.value_length");
            value_length && *value_length != *key_length) {
            fail(dot + "attention.value_length", "expected the key length ", *key_length, "; got ", *value_length);
        }
    } else {
        if (h.n_embd % h.n_head != 0) {
            fail("gguf", "expected the key " + dot + "attention.key_length", "; got ", "none");
        }
        h.head_dim = h.n_embd / h.n_head;
    }

    h.block = read_block(file, h.architecture);
    const char* epsilon =
        h.block.norm == Norm::rms ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon";
    h.norm_eps = read_float(file, dot + epsilon, 0.0F, 1.0F, 1e-5F);
    h.n_rot = h.head_dim;
    if (file.find_u32(dot + "rope.dimension_count")) {
        h.n_rot = need("rope.dimension_count", 2, h.head_dim);
    }
    if (h.block.position == Position::rope && h.n_rot % 2 != 0) {
        fail(dot + "rope.dimension_count", "expected an even number", "; got ", h.n_rot);
    }
    h.clamp_kqv = read_float(file, dot + "attention.clamp_kqv", 0.0F, 1e6F, 0.0F);
    h.max_alibi_bias = read_float(file, dot + "attention.max_alibi_bias", 0.0F, 1e6F, 0.0F);
    if (h.block.position == Position::alibi && h.max_alibi_bias <= 0.0F) {
        fail(dot + "attention.max_alibi_bias", "expected a positive number for position alibi", "; got ",
             h.max_alibi_bias);
    }
    if (h.block.position != Position::alibi) {
        h.max_alibi_bias = 0.0F;
    }
    h.window =
        static_cast<int>(std::min<uint32_t>(file.find_u32(dot + "attention.sliding_window").value_or(0), 1U << 30));

    const TensorInfo* embedding = file.find_tensor("token_embd.weight");
    if (embedding == nullptr || embedding->n_dims != 2 || embedding->ne[0] != h.n_embd) {
        fail("gguf", "expected a tensor token_embd.weight of width ", h.n_embd, "; got ",
             embedding == nullptr ? std::string("none") : std::to_string(embedding->ne[0]));
    }
    h.n_vocab = static_cast<int>(embedding->ne[1]);
    return h;
}

}  // namespace lkv
