#include "cuda/session/file.h"

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>
#include <vector>

#include "files/gguf_bytes.h"

namespace lkv::test {

namespace {

class Writer {
public:
    Writer(const Shape& shape, unsigned seed, float rounding, unsigned twin)
        : shape_(shape), rounding_(rounding), twin_(twin), random_(seed) {
        const std::string arch = "llama.";
        const auto number = [&](const std::string& key, int value) {
            file_.value<uint32_t>(key, GgufType::u32, static_cast<uint32_t>(value));
        };
        file_.string("general.architecture", "llama");
        number(arch + "block_count", shape.n_layer + (shape.guesses ? 1 : 0));
        if (shape.guesses) number(arch + "nextn_predict_layers", 1);
        number(arch + "context_length", 4096);
        number(arch + "embedding_length", n_embd);
        number(arch + "feed_forward_length", n_ff);
        if (!shape.gated) number(arch + "attention.head_count", n_kv * rep);
        number(arch + "attention.head_count_kv", shape.turned > 0 ? 1 : n_kv);
        number(arch + "attention.key_length", shape.at(1).head_dim);
        if (shape.turned > 0) {
            number(arch + "attention.value_length", shape.head_dim - shape.turned);
            number(arch + "attention.kv_lora_rank", shape.head_dim - shape.turned);
            number(arch + "attention.key_length_mla", n_key + shape.turned);
            number(arch + "attention.value_length_mla", n_value);
            number(arch + "rope.dimension_count", shape.turned);
        }
        if (shape.of_keys) number(arch + "attention.key_length_swa", shape.head_dim);
        if (shape.shares) {
            number(arch + "attention.shared_kv_layers", shape.n_layer / 2);
            number(arch + "embedding_length_per_layer_input", n_brought);
        }
        number("latentkv.version", 1);
        number("latentkv.regions.sink", 4);
        number("latentkv.regions.recent", 32);
        if (shape.unlike || shape.n_expert > 0 || shape.hybrid || shape.gated) block();
        if (shape.hybrid) mixers();
        if (shape.n_expert > 0) {
            number(arch + "expert_count", shape.n_expert);
            number(arch + "expert_used_count", shape.n_expert);
            number(arch + "expert_feed_forward_length", n_ff);
        }
        cache(shape, "k", shape.k_path);
        cache(shape, "v", shape.v_path);
        if (shape.turned > 0) mla_cache(shape);
        weights(shape);
    }

    Bytes bytes() const { return file_.bytes(); }

private:
    template <class T>
    std::vector<T> by_layer(T even, T odd) const {
        std::vector<T> of;
        for (int il = 0; il < shape_.n_layer; il++) of.push_back(il % 2 == 0 ? even : odd);
        return of;
    }

    // Without them, of MLA, rows are the model's own; else its turned channels, and segments of the narrowed latent.
    void mla_cache(const Shape& shape) {
        if (is_full(shape.v_path)) return;
        const auto n = static_cast<uint32_t>(shape.n_segments);
        std::vector<uint32_t> widths;
        for (int il = 0; il < shape.n_layer; il++) {
            widths.push_back(static_cast<uint32_t>(shape.turned));
            const auto width = static_cast<uint32_t>(shape.rank - shape.turned) / (n - 1);
            widths.insert(widths.end(), n - 1, width);
        }
        const auto of_all = [&](uint32_t x) { return by_layer(x, x); };
        file_.strings("latentkv.k.path", by_layer<std::string>("value", "value"))
            .strings("latentkv.v.path", by_layer<std::string>("latent", "latent"))
            .array<uint32_t>("latentkv.k.group", GgufType::u32, of_all(1))
            .array<uint32_t>("latentkv.v.group", GgufType::u32, of_all(1))
            .array<uint32_t>("latentkv.v.ranks", GgufType::u32, of_all(static_cast<uint32_t>(shape.rank)))
            .array<uint32_t>("latentkv.v.segment_counts", GgufType::u32, of_all(n))
            .array<uint32_t>("latentkv.v.segment_widths", GgufType::u32, widths);
    }
    void mla_weights(const Shape& s, const std::string& blk) {
        const int64_t n_head = n_kv * rep;
        const int64_t latent = s.head_dim - s.turned;
        const int64_t rank = s.rank - s.turned;
        product(blk + "attn_q.weight", n_embd, n_head * (n_key + s.turned));
        product(blk + "attn_kv_a_mqa.weight", n_embd, s.head_dim);
        tensor(blk + "attn_kv_a_norm.weight", {latent}, 0.1, 1.0F);
        tensor(blk + "attn_k_b.weight", {n_key, rank, n_head}, 1.0 / std::sqrt(n_key));
        tensor(blk + "attn_v_b.weight", {rank, n_value, n_head}, 1.0 / std::sqrt(rank));
        product(blk + "attn_output.weight", n_head * n_value, n_embd);
        if (is_full(s.v_path)) return;
        product(blk + "attn_v_e.weight", latent, rank);
        tensor(blk + "attn_v_e.bias", {latent}, 0.1);
    }

    void cache(const Shape& shape, const std::string& side, const char* path) {
        if (shape.turned > 0) return;
        const bool full = is_full(path);
        const auto group = static_cast<uint32_t>(full ? 1 : shape.group);
        const uint32_t n_segments = full ? 1 : static_cast<uint32_t>(shape.n_segments);
        const auto none = side == "k" && shape.one_row ? 1U : group;
        std::vector<uint32_t> ranks;
        std::vector<uint32_t> widths;
        for (int il = 0; il < shape.n_layer; il++) {
            const auto rank = static_cast<uint32_t>(full ? shape.at(il).head_dim : shape.rank);
            const auto n = static_cast<size_t>(shape.n_groups(path, side == "v", il));
            ranks.insert(ranks.end(), n, rank);
            widths.insert(widths.end(), n * n_segments, rank / n_segments);
        }
        const std::string key = "latentkv." + side + ".";
        const char* const even = shape.hybrid ? "full" : path;
        auto paths = by_layer<std::string>(even, side == "k" ? shape.at(1).k_path : path);
        auto groups = by_layer(shape.hybrid ? 1U : group, none);
        for (size_t il = paths.size() / 2; shape.shares && il < paths.size(); il++) {
            paths[il] = "full";
            groups[il] = 1;
        }
        file_.strings(key + "path", paths)
            .array<uint32_t>(key + "group", GgufType::u32, groups)
            .array<uint32_t>(key + "ranks", GgufType::u32, ranks)
            .array<uint32_t>(key + "segment_counts", GgufType::u32, std::vector<uint32_t>(ranks.size(), n_segments))
            .array<uint32_t>(key + "segment_widths", GgufType::u32, widths);
    }

    // What models say whose layers differ.
    void block() {
        const std::string key = "latentkv.block.";
        file_.string(key + "norm", "rms")
            .string(key + "activation", "silu")
            .string(key + "ffn", shape_.n_expert > 0 ? "experts" : "gated");
        file_.string(key + "position", "rope").string(key + "rope_pairing", "neox");
        file_.value<uint8_t>(key + "parallel", GgufType::boolean, 0);
        if (shape_.gated) {
            file_.string(key + "gate", "softplus");
            file_.array<uint32_t>(
                "llama.attention.head_count", GgufType::u32,
                by_layer(static_cast<uint32_t>(shape_.n_head(0)), static_cast<uint32_t>(shape_.n_head(1))));
            file_.value<float>("llama.attention.temperature_scale", GgufType::f32, 0.3F);
            file_.value<uint32_t>("llama.rope.scaling.original_context_length", GgufType::u32, 16);
        }
        if (!shape_.unlike) return;
        if (shape_.of_keys) {
            file_.value<uint8_t>(key + "value_norm", GgufType::boolean, 1);
            file_.value<uint8_t>(key + "value_of_key", GgufType::boolean, 1);
        }
        file_.value<float>(key + "embedding_scale", GgufType::f32, 8.0F);
        file_.value<float>(key + "attention_scale", GgufType::f32, 0.1F);
        if (shape_.softcap > 0.0F) file_.value<float>(key + "attention_softcap", GgufType::f32, shape_.softcap);
        file_.value<float>(key + "residual_scale", GgufType::f32, 0.5F);
        file_.value<float>(key + "logit_softcap", GgufType::f32, 30.0F);
        file_.array<uint32_t>(key + "windows", GgufType::u32, by_layer(24U, 0U));
        file_.array<float>(key + "rope_bases", GgufType::f32, by_layer(100.0F, shape_.group == 2 ? 10000.0F : 0.0F));
        file_.array<uint8_t>(key + "rope_scaled", GgufType::boolean, by_layer<uint8_t>(0, 1));
        file_.string("llama.rope.scaling.type", "linear");
        file_.value<float>("llama.rope.scaling.factor", GgufType::f32, 8.0F);
    }

    void mixers() {
        file_.strings("latentkv.block.mixers", by_layer<std::string>("delta_net", "attention"));
        file_.value<uint8_t>("latentkv.block.output_gate", GgufType::boolean, 1);
        const auto number = [&](const char* key, uint32_t value) {
            file_.value<uint32_t>(std::string("llama.ssm.") + key, GgufType::u32, value);
        };
        number("conv_kernel", 4);
        number("state_size", 32);
        number("group_count", 2);
        number("time_step_rank", 4);
        number("inner_size", 128);
    }
    void delta_net(const std::string& blk) {
        product(blk + "attn_qkv.weight", n_embd, 256);
        product(blk + "attn_gate.weight", n_embd, 128);
        tensor(blk + "ssm_conv1d.weight", {4, 256}, 0.5);
        tensor(blk + "ssm_a", {4}, 0.3, -1.0F);
        tensor(blk + "ssm_dt.bias", {4}, 0.5, -1.0F);
        product(blk + "ssm_beta.weight", n_embd, 4);
        product(blk + "ssm_alpha.weight", n_embd, 4);
        tensor(blk + "ssm_norm.weight", {32}, 0.1, 1.0F);
        product(blk + "ssm_out.weight", 128, n_embd);
    }

    void tensor(const std::string& name, const std::vector<int64_t>& ne, double deviation, float mean = 0.0F) {
        file_.tensor(name, ne, GGML_TYPE_F32);
        const auto n = std::accumulate(ne.begin(), ne.end(), int64_t{1}, std::multiplies<>());
        std::vector<float> values(static_cast<size_t>(n));
        for (float& x : values) x = mean + static_cast<float>(deviation) * normal_(random_);
        for (float& x : values) {
            if (rounding_ > 0.0F) x *= 1.0F + rounding_ * normal_(twin_);
        }
        const size_t bytes = values.size() * sizeof(float);
        std::memcpy(file_.data.data() + file_.data.size() - bytes, values.data(), bytes);
    }
    // value(i): of number i, counted with the first of ne fastest
    template <class Value>
    void filled(const std::string& name, const std::vector<int64_t>& ne, Value value) {
        tensor(name, ne, 0.0);
        const auto n = std::accumulate(ne.begin(), ne.end(), int64_t{1}, std::multiplies<>());
        uint8_t* at = file_.data.data() + file_.data.size() - static_cast<size_t>(n) * sizeof(float);
        for (int64_t i = 0; i < n; i++, at += sizeof(float)) {
            const float x = value(i) ? 1.0F : 0.0F;
            std::memcpy(at, &x, sizeof x);
        }
    }
    // E: what latents are of K or V; B or E_q
    void encoder(const std::string& name, const Shape& s, int64_t all_ranks) {
        const int64_t width = int64_t{s.group} * s.head_dim;
        if (s.encoded != Shape::identity) return product(name, width, all_ranks);
        filled(name, {width, all_ranks}, [=](int64_t i) { return i % width == i / width % width; });
    }
    void decoder(const std::string& name, const Shape& s) {
        const int64_t w = n_kv * s.head_dim;
        if (s.encoded != Shape::identity) return tensor(name, {s.rank, w}, 1.0 / std::sqrt(s.rank));
        filled(name, {s.rank, w}, [=](int64_t i) { return i % s.rank == i / s.rank % s.rank; });
    }
    void queries(const std::string& name, const Shape& s) {
        if (s.encoded != Shape::identity) return tensor(name, {s.head_dim, s.rank, n_kv}, 1.0 / std::sqrt(s.rank));
        filled(name, {s.head_dim, s.rank, n_kv}, [=](int64_t i) {
            const int64_t head = i / (int64_t{s.head_dim} * s.rank) % s.group;
            return i / s.head_dim % s.rank == head * s.head_dim + i % s.head_dim;
        });
    }
    void product(const std::string& name, int64_t n_in, int64_t n_out) {
        tensor(name, {n_in, n_out}, 1.0 / std::sqrt(n_in));
    }

    void ffn(const std::string& blk, int n_expert) {
        if (n_expert == 0) {
            product(blk + "ffn_gate.weight", n_embd, n_ff);
            product(blk + "ffn_up.weight", n_embd, n_ff);
            product(blk + "ffn_down.weight", n_ff, n_embd);
            return;
        }
        product(blk + "ffn_gate_inp.weight", n_embd, n_expert);
        tensor(blk + "ffn_gate_inp.bias", {n_expert}, 0.3);
        for (const std::string name : {"gate", "up", "down"}) {
            const int64_t n_in = name == "down" ? n_ff : n_embd;
            const int64_t n_out = name == "down" ? n_embd : n_ff;
            tensor(blk + "ffn_" + name + "_exps.weight", {n_in, n_out, n_expert}, 1.0 / std::sqrt(n_in));
            tensor(blk + "ffn_" + name + "_exps.bias", {n_out, n_expert}, 0.3);
        }
    }

    void weights(const Shape& all) {
        tensor("token_embd.weight", {n_embd, n_vocab}, 1.0);
        tensor("output_norm.weight", {n_embd}, 0.1, 1.0F);
        if (all.shares) {
            tensor("per_layer_token_embd.weight", {int64_t{n_brought} * all.n_layer, n_vocab}, 1.0);
            product("per_layer_model_proj.weight", n_embd, int64_t{n_brought} * all.n_layer);
            tensor("per_layer_proj_norm.weight", {n_brought}, 0.1, 1.0F);
        }
        for (int il = 0; il < all.n_layer; il++) layer(all.at(il), il);
        if (all.guesses) guesses(all);
    }

    // Full rows, behind the other layers.
    void guesses(const Shape& all) {
        Shape s = all;
        s.k_path = all.turned > 0 ? "value" : "full";
        s.v_path = "full";
        s.encoded = Shape::no;
        s.rank = all.head_dim;
        layer(s, all.n_layer);
        const std::string blk = "blk." + std::to_string(all.n_layer) + ".nextn.";
        product(blk + "eh_proj.weight", 2 * n_embd, n_embd);
        for (const std::string name : {"enorm", "hnorm", "shared_head_norm"}) {
            tensor(blk + name + ".weight", {n_embd}, 0.3, 1.0F);
        }
    }

    void layer(const Shape& s, int il) {
        const int64_t all_ranks = int64_t{n_kv / s.group} * s.rank;
        const int64_t w = n_kv * s.head_dim;
        const bool has_v = !s.of_keys || il % 2 == 0;
        const std::string blk = "blk." + std::to_string(il) + ".";
        if (!s.whole_norms) {
            tensor(blk + "attn_norm.weight", {n_embd}, 0.1, 1.0F);
            tensor(blk + "ffn_norm.weight", {n_embd}, 0.1, 1.0F);
        }
        if (s.unlike) tensor(blk + "post_attention_norm.weight", {n_embd}, 0.1, 1.0F);
        if (s.unlike) tensor(blk + "post_ffw_norm.weight", {n_embd}, 0.1, 1.0F);
        ffn(blk, s.n_expert);
        if (s.shares) {
            product(blk + "inp_gate.weight", n_embd, n_brought);
            product(blk + "proj.weight", n_brought, n_embd);
            tensor(blk + "post_norm.weight", {n_embd}, 0.1, 1.0F);
        }
        if (s.hybrid && il % 2 == 0 && il < s.n_layer) {
            delta_net(blk);
            return;
        }
        if (s.turned > 0) {
            mla_weights(s, blk);
            return;
        }
        const int64_t wq = int64_t{s.n_head(il)} * s.head_dim;
        product(blk + "attn_q.weight", n_embd, wq * (s.hybrid ? 2 : 1));
        product(blk + "attn_output.weight", wq, n_embd);
        if (s.gated) product(blk + "attn_gate.weight", n_embd, s.n_head(il));
        if (s.sinks) tensor(blk + "attn_sinks.weight", {s.n_head(il)}, 1.0, 3.0F);
        if (s.shares && il >= s.n_layer / 2) return;
        const std::string k_path = s.k_path;
        const bool encoded = s.encoded != Shape::no;
        if (k_path == "rebuild" && !encoded) {
            product(blk + "attn_k_a.weight", n_embd, all_ranks);
        } else {
            product(blk + "attn_k.weight", n_embd, w);
        }
        if (k_path == "rotated" || (k_path == "rebuild" && encoded)) {
            encoder(blk + "attn_k_e.weight", s, all_ranks);
        }
        if (k_path == "rebuild") decoder(blk + "attn_k_b.weight", s);
        if (k_path == "rotated") queries(blk + "attn_q_e.weight", s);
        if (s.whole_norms) {
            tensor(blk + "attn_q_norm.weight", {wq}, 0.1, 1.0F);
            tensor(blk + "attn_k_norm.weight", {w}, 0.1, 1.0F);
            if (k_path == "rebuild") tensor(blk + "attn_k_e.bias", {w}, 0.3);
        } else if ((k_path == "rebuild" && (s.head_dim == 128 || s.of_keys)) || k_path == "value") {
            tensor(blk + "attn_k_norm.weight", {s.head_dim}, 0.1, 1.0F);
        }
        if (k_path == "rebuild" && (s.head_dim == 64 || s.whole_norms)) tensor(blk + "attn_k.bias", {w}, 0.3);
        if (has_v && (is_full(s.v_path) || encoded)) product(blk + "attn_v.weight", n_embd, w);
        if (is_full(s.v_path)) return;
        if (encoded) {
            encoder(blk + "attn_v_e.weight", s, all_ranks);
            if (s.encoded == Shape::random) tensor(blk + "attn_v_e.bias", {w}, 0.3);
            tensor(blk + "attn_v.bias", {w}, 0.3);
        } else {
            product(blk + "attn_v_a.weight", n_embd, all_ranks);
        }
        decoder(blk + "attn_v_b.weight", s);
    }

    GgufBytes file_;
    Shape shape_;
    float rounding_;
    std::mt19937 twin_;  // of the deviations
    std::mt19937 random_;
    std::normal_distribution<float> normal_;
};

}  // namespace

File::File(const Shape& shape, unsigned seed, float rounding, unsigned twin) : shape_(shape), seed_(seed) {
    static int n_files = 0;  // several live at a time
    path_ = std::filesystem::temp_directory_path() /
            ("gpu-session-" + std::to_string(::getpid()) + "-" + std::to_string(n_files++) + ".gguf");
    const Bytes bytes = Writer(shape, seed, rounding, twin).bytes();
    std::ofstream(path_, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace lkv::test
