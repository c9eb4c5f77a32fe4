// Whole sessions on the GPU against the same on the CPU: random legal combinations of windows, row formats and plans, on small random
// models of every path. Both decode a prompt in pieces, single tokens, and a second sequence.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <sstream>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "check.h"
#include "devices/gpus.h"
#include "files/gguf_bytes.h"
#include "ggml-alloc.h"
#include "runtime/branches.h"
#include "runtime/gpu.h"
#include "runtime/plan/rotation.h"
#include "runtime/session.h"

// The emulated GPU has it (emulated_gpu/device.h), a real one does not.
extern "C" [[gnu::weak]] void emulated_fail_allocation(int nth);
extern "C" [[gnu::weak]] size_t emulated_copied_bytes();

namespace {

using lkv::GgufType;
using lkv::test::GgufBytes;
using lkv::test::relative_error;

constexpr int n_embd = 64;
constexpr int n_ff = 96;
constexpr int n_kv = 2;
constexpr int rep = 2;
constexpr int n_vocab = 96;
// The share of the formats' error that GPU and CPU may differ by. ggml-cuda multiplies f32 in TF32; where products are f32 (the emulated GPU),
// a third of it is enough.
double share_of_formats = 0.6;
// How much logits may differ between two GPUs and one. cuBLAS may choose otherwise for other addresses, and multiplies in TF32; the emulated GPU does not.
double most_across = 1e-3;
int n_gpus = 0;

// The files' cache: one latent a group of `group` heads, of `rank` channels in `n_segments` segments.
struct Shape {
    const char* k_path;
    const char* v_path;
    int head_dim;
    int group;
    int rank;
    int n_segments;
    // Latents are E of K and V, so that exact windows hold full rows. `identity`: E, B and E_q change nothing, and it is the same which
    // tokens are exact.
    enum Encoded { no, random, identity } encoded = no;
    bool unlike = false;  // layers have windows and RoPE of their own, branches norms behind them
    // Experts of the FFN; each token has all of them, as the choice may hang on a rounding
    int n_expert = 0;
    bool sinks = false;
    float softcap = 0.0F;      // of scores
    bool whole_norms = false;  // of Q and K over all heads, none before a branch
    int n_layer = 2;           // even ones are alike, and odd ones
    bool hybrid = false;       // even ones are gated delta nets, and the others have an output gate
    // Odd layers have heads of twice the width, and V of the key projection; V has a norm without weights.
    bool of_keys = false;
    bool one_row = false;  // and no rows of K
    bool gated = false;    // queries grow with their position, odd layers have more of them, and each head has a gate
    // The second half of the layers reads the K and V of the first, and tokens bring numbers to each layer.
    bool shares = false;
    int turned =
        0;  // above 0: MLA, whose rows are so many turned channels and a latent, together `head_dim`; narrowed: `rank`

    Shape at(int layer) const {
        Shape own = *this;
        if (of_keys && layer % 2 == 1) own.head_dim *= 2;
        if (one_row && layer % 2 == 1) own.k_path = "value";
        return own;
    }
    int n_head(int layer) const { return n_kv * (gated && layer % 2 == 1 ? 3 : rep); }
    // Groups of a layer that have rows of K or V.
    int n_groups(const char* path, bool value_side, int layer) const {
        if (shares && layer >= n_layer / 2) return 0;
        if (turned > 0) return value_side ? 1 : 0;
        if ((hybrid && layer % 2 == 0) || (one_row && !value_side && layer % 2 == 1)) return 0;
        return n_kv / (std::string(path) == "full" ? 1 : group);
    }
};
constexpr Shape shapes[] = {
    {"rotated", "latent", 128, 2, 256, 4, Shape::identity},
    {"rebuild", "latent", 128, 2, 256, 4, Shape::identity},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random},
    {"rebuild", "latent", 128, 2, 128, 4, Shape::random},
    {"rebuild", "latent", 64, 1, 48, 3, Shape::random},
    {"rotated", "full", 64, 2, 64, 4, Shape::random},
    {"full", "latent", 64, 1, 32, 2, Shape::random},
    {"full", "full", 64, 1, 64, 1},
    {"rotated", "latent", 128, 2, 256, 4},
    {"rotated", "latent", 64, 1, 64, 2},
    {"rebuild", "latent", 128, 2, 128, 4},
    {"rebuild", "full", 64, 1, 64, 4},
    {"full", "latent", 128, 2, 192, 6},
    {"rotated", "latent", 64, 2, 128, 8},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, true},
    {"rebuild", "latent", 128, 2, 128, 4, Shape::random, true},
    {"rebuild", "latent", 64, 1, 64, 4, Shape::no, true},
    {"rotated", "latent", 256, 1, 64, 4, Shape::random, true},
    {"rebuild", "latent", 256, 1, 128, 4, Shape::random, true},
    {"full", "full", 256, 1, 256, 1, Shape::no, true},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, false, 3},
    {"rebuild", "full", 64, 1, 64, 4, Shape::no, true, 2},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, false, 0, true},
    {"rebuild", "latent", 128, 2, 128, 4, Shape::random, true, 0, true},
    {"rebuild", "full", 64, 1, 64, 4, Shape::no, false, 0, true},
    {"full", "full", 64, 1, 64, 1, Shape::no, true, 0, true},
    {"rotated", "latent", 256, 1, 64, 4, Shape::random, true, 0, false, 2.0F},
    {"rebuild", "latent", 64, 1, 48, 3, Shape::random, true, 0, true, 2.0F},
    {"full", "latent", 128, 2, 192, 6, Shape::no, false, 0, true},
    {"rotated", "latent", 128, 2, 256, 4, Shape::no, false, 0, true},
    {"rebuild", "latent", 128, 2, 128, 4, Shape::random, true, 0, false, 0.0F, true},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, true, 0, false, 0.0F, true},
    {"rebuild", "latent", 128, 2, 256, 4, Shape::identity, true, 0, false, 0.0F, true},
    {"full", "full", 64, 1, 64, 1, Shape::no, true, 0, false, 0.0F, true},
    {"rotated", "latent", 128, 2, 256, 4, Shape::identity, false, 0, false, 0.0F, false, 4, true},
    {"rebuild", "latent", 64, 1, 48, 3, Shape::random, false, 0, false, 0.0F, false, 4, true},
    {"full", "full", 256, 1, 256, 1, Shape::no, false, 0, false, 0.0F, false, 4, true},
    {"rotated", "latent", 256, 2, 96, 6, Shape::random, true, 0, false, 0.0F, false, 2, false, true},
    {"rebuild", "latent", 256, 1, 64, 4, Shape::random, true, 0, false, 0.0F, false, 2, false, true},
    {"full", "full", 256, 1, 256, 1, Shape::no, true, 0, false, 0.0F, false, 2, false, true},
    {"rebuild", "latent", 256, 1, 64, 4, Shape::random, true, 0, false, 0.0F, false, 2, false, true, true},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, true, 0, false, 2.0F, false, 2, false, true, true},
    {"rebuild", "latent", 64, 2, 96, 6, Shape::random, true, 0, true, 0.0F, false, 2, false, true, true},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, false, 0, false, 0.0F, false, 2, false, false, false, true},
    {"rebuild", "latent", 128, 2, 128, 4, Shape::random, true, 0, false, 0.0F, false, 2, false, false, false, true},
    {"full", "full", 64, 1, 64, 1, Shape::no, true, 0, false, 0.0F, false, 2, false, false, false, true},
    {"full", "full", 64, 1, 64, 1, Shape::no, true, 0, false, 0.0F, false, 4, false, false, false, false, true},
    {"full", "full", 256, 1, 256, 1, Shape::no, false, 0, false, 0.0F, false, 4, false, false, false, false, true},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, true, 0, false, 0.0F, false, 4, false, false, false, false,
     true},
    {"rebuild", "latent", 128, 2, 128, 4, Shape::random, true, 0, false, 0.0F, false, 4, false, false, false, false,
     true},
    {"rotated", "latent", 256, 2, 384, 4, Shape::random},
    {.k_path = "value", .v_path = "full", .head_dim = 160, .group = 1, .rank = 160, .n_segments = 1, .turned = 32},
    {.k_path = "value", .v_path = "latent", .head_dim = 160, .group = 1, .rank = 128, .n_segments = 4, .turned = 32},
    {.k_path = "value", .v_path = "latent", .head_dim = 112, .group = 1, .rank = 112, .n_segments = 3, .turned = 16},
    {.k_path = "rotated",
     .v_path = "latent",
     .head_dim = 64,
     .group = 2,
     .rank = 128,
     .n_segments = 4,
     .encoded = Shape::random,
     .n_layer = 1},
};
constexpr int n_key = 32;  // with MLA: channels of a head's key that are not turned, and of its value
constexpr int n_value = 24;
constexpr int n_brought = 16;  // numbers that a token brings to a layer

// The first shape of a path whose exact windows are full rows beside latents.
const Shape* first_encoded(const char* k_path) {
    return std::find_if(std::begin(shapes), std::end(shapes), [k_path](const Shape& s) {
        return s.k_path == std::string(k_path) && s.encoded == Shape::random;
    });
}

// Shapes that run on both devices together, too: of every path, one with windows.
bool splits(const Shape& shape) {
    const auto index = static_cast<size_t>(&shape - shapes);
    return index == 2 || index == 7 || index == 27 || shape.hybrid || shape.turned > 0;
}

bool is_full(const char* path) { return std::string(path) == "full"; }

class File {
public:
    // rounding: relative deviation of every weight, of random number `twin`
    File(const Shape& shape, unsigned seed, float rounding = 0.0F, unsigned twin = 0)
        : shape_(shape), seed_(seed), rounding_(rounding), twin_(twin), random_(seed) {
        const std::string arch = "llama.";
        const auto number = [&](const std::string& key, int value) {
            file_.value<uint32_t>(key, GgufType::u32, static_cast<uint32_t>(value));
        };
        file_.string("general.architecture", "llama");
        number(arch + "block_count", shape.n_layer);
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
        static int n_files = 0;  // several live at a time
        path_ = std::filesystem::temp_directory_path() /
                ("gpu-session-" + std::to_string(::getpid()) + "-" + std::to_string(n_files++) + ".gguf");
        const lkv::test::Bytes bytes = file_.bytes();
        std::ofstream(path_, std::ios::binary)
            .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File() { std::filesystem::remove(path_); }

    std::string path() const { return path_.string(); }
    File twin(float rounding, unsigned number) const { return {shape_, seed_, rounding, number}; }

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
        const int64_t all_ranks = int64_t{n_kv / all.group} * all.rank;
        tensor("token_embd.weight", {n_embd, n_vocab}, 1.0);
        tensor("output_norm.weight", {n_embd}, 0.1, 1.0F);
        if (all.shares) {
            tensor("per_layer_token_embd.weight", {int64_t{n_brought} * all.n_layer, n_vocab}, 1.0);
            product("per_layer_model_proj.weight", n_embd, int64_t{n_brought} * all.n_layer);
            tensor("per_layer_proj_norm.weight", {n_brought}, 0.1, 1.0F);
        }
        for (int il = 0; il < all.n_layer; il++) {
            const Shape s = all.at(il);
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
            if (s.hybrid && il % 2 == 0) {
                delta_net(blk);
                continue;
            }
            if (s.turned > 0) {
                mla_weights(s, blk);
                continue;
            }
            const int64_t wq = int64_t{s.n_head(il)} * s.head_dim;
            product(blk + "attn_q.weight", n_embd, wq * (s.hybrid ? 2 : 1));
            product(blk + "attn_output.weight", wq, n_embd);
            if (s.gated) product(blk + "attn_gate.weight", n_embd, s.n_head(il));
            if (s.sinks) tensor(blk + "attn_sinks.weight", {s.n_head(il)}, 1.0, 3.0F);
            if (s.shares && il >= s.n_layer / 2) continue;
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
            if (is_full(s.v_path)) continue;
            if (encoded) {
                encoder(blk + "attn_v_e.weight", s, all_ranks);
                if (s.encoded == Shape::random) tensor(blk + "attn_v_e.bias", {w}, 0.3);
                tensor(blk + "attn_v.bias", {w}, 0.3);
            } else {
                product(blk + "attn_v_a.weight", n_embd, all_ranks);
            }
            decoder(blk + "attn_v_b.weight", s);
        }
    }

    GgufBytes file_;
    Shape shape_;
    unsigned seed_;
    float rounding_;
    std::mt19937 twin_;  // of the deviations
    std::mt19937 random_;
    std::normal_distribution<float> normal_;
    std::filesystem::path path_;
};

template <class T>
T one_of(std::mt19937& random, const std::vector<T>& of) {
    return of[random() % of.size()];
}

// A plan for the segments of one side: bits that do not rise along a group, dropped segments last; as a master file's budget chooses.
std::vector<std::string> plan(std::mt19937& random, const Shape& shape, const char* path, bool value_side) {
    const std::vector<std::string> formats = {"f16", "q8", "q4", "q2", "q1", "none"};
    const bool full = is_full(path);
    const bool whole_mla = shape.turned > 0 && is_full(shape.v_path);
    int n_groups = 0;
    for (int il = 0; il < shape.n_layer; il++) n_groups += shape.n_groups(path, value_side, il);
    std::vector<std::string> all;
    for (int g = 0; g < n_groups; g++) {
        size_t at = random() % 3;
        for (int s = 0; s < (whole_mla ? 2 : full ? 1 : shape.n_segments); s++) {
            all.push_back(formats[at]);
            at = std::min(formats.size() - 1, at + random() % 3);
        }
    }
    return all;
}

struct Combination {
    lkv::SessionOptions options;
    std::string name;
    int prompt = 40;  // tokens of the longest call
};

Combination combination(std::mt19937& random, const Shape& shape) {
    Combination c;
    lkv::SessionOptions& o = c.options;
    o.n_ctx = 256;
    o.n_threads = 1;
    o.n_seq_max = one_of(random, std::vector{2, 2, 3});
    o.n_ubatch = one_of(random, std::vector{7, 64, 512});
    o.sink = one_of(random, std::vector{-1, 0, 0, 1, 5});
    o.recent = one_of(random, std::vector{-1, 0, 0, 1, 20});
    if (random() % 4 == 0) o.recent_ratio = one_of(random, std::vector{0.0, 0.3, 1.0});
    const std::vector<std::string> formats = {"", "", "f16", "q8", "q6", "q4", "q2", "q5", "q8_0", "q4_0"};
    if (random() % 2 == 0) {
        o.k_plan = plan(random, shape, shape.k_path, false);
        o.v_plan = plan(random, shape, shape.v_path, true);
    } else {
        o.kv = one_of(random, formats);
    }
    o.kv_sink = one_of(random, formats);
    o.kv_recent = one_of(random, formats);
    std::ostringstream name;
    name << shape.k_path << "/" << shape.v_path << " " << shape.rank << " of " << shape.group << ", sink " << o.sink
         << ", recent " << o.recent << ", ratio " << o.recent_ratio << ", kv '" << o.kv << "', kv_sink '" << o.kv_sink
         << "', kv_recent '" << o.kv_recent << "', " << o.n_seq_max << " sequences, ubatch " << o.n_ubatch << ", plan";
    for (const auto& format : o.k_plan) name << " " << format;
    name << " /";
    for (const auto& format : o.v_plan) name << " " << format;
    c.name = name.str();
    return c;
}

// A few shapes of every path, with and without encoded latents. Lazy prompts attend to whole K and V, or to latents that are uncut.
bool in_token_blocks(size_t shape, const std::string& prefill) {
    const std::set<size_t> of = prefill == "lazy" ? std::set<size_t>{4, 7, 9, 11} : std::set<size_t>{2, 7};
    return of.contains(shape);
}

// Slots of the layers with a window.
int ring_slots(const File& file, const lkv::SessionOptions& options) {
    const lkv::Model model(file.path(), {});
    const lkv::KvCache cache(model.hparams(), model.cache_spec(), lkv::resolve(model, options).cache, false);
    return cache.placement().ring() != nullptr ? cache.placement().ring()->cells().capacity() : 0;
}

// So many of the last layers on one GPU.
lkv::GpuOptions on_gpu(int n_gpu_layers, int gpu = 0) {
    return {n_gpu_layers, {}, gpu, n_gpu_layers == 0 ? lkv::SplitMode::layer : lkv::SplitMode::none};
}

std::shared_ptr<const lkv::Model> open(const File& file, const lkv::GpuOptions& gpu) {
    return std::make_shared<lkv::Model>(file.path(), lkv::ModelOptions{.gpu = gpu});
}

// Every layer with rows of its own says which nodes lead where, in the order in which they are drawn, and up to eight tokens' K, V and
// queries need nothing of one another.
void roles(const std::string& path) {
    const auto model = std::make_shared<lkv::Model>(path, lkv::ModelOptions{.gpu = on_gpu(99)});
    const lkv::HParams& h = model->hparams();
    lkv::SessionOptions options;
    options.n_ctx = 256;
    const lkv::SessionPlan plan = lkv::resolve(*model, options);
    lkv::KvCache cache(h, model->cache_spec(), plan.cache, false);
    const auto rotates = [&](bool values) { return plan.kv_rotate && lkv::rotates_full(*model, cache, values); };
    const lkv::Ropes ropes = lkv::read_ropes(model->file(), h, options.n_ctx);
    const ggml_backend_buffer_type_t host = ggml_backend_cpu_buffer_type();
    const lkv::GraphConstants constants = lkv::make_graph_constants(h, ropes, rotates(false), rotates(true), host);
    const lkv::StateTensors states(h, model->runs().front(), cache.states().n_slots(), host, false);
    const lkv::BatchSlots batch;
    size_t own = 0;
    for (int il = 0; il < h.n_layer; il++) own += h.attends(il) && h.makes_rows(il) ? 1 : 0;
    for (const int n_tokens : {1, 2, 8, 9, 64, 65}) {
        for (const bool middle : {false, true}) {
            lkv::GraphShape of;
            of.n_tokens = n_tokens;
            of.latents = of.ring = middle;
            lkv::run_on_gpu(of);
            const auto graph = lkv::build_graph(*model, cache, ropes, constants, &states, batch, of);
            const ggml_gallocr_ptr allocator(ggml_gallocr_new(host));
            CHECK(ggml_gallocr_alloc_graph(allocator.get(), graph->nodes));
            CHECK(graph->roles.layers.size() == own);
            int next = 0;
            for (const lkv::LayerRoles& layer : graph->roles.layers) {
                const std::array at{next,        layer.ahead, layer.input,    layer.k,        layer.v,
                                    layer.store, layer.rope,  layer.latent_q, layer.attention};
                CHECK(std::is_sorted(at.begin(), at.end()));
                CHECK(ggml_graph_node(graph->nodes, layer.attention)->src[1] ==
                      ggml_graph_node(graph->nodes, layer.store));
                next = layer.attention + 1;
            }
            const size_t concurrent = lkv::concurrent_layers(graph->nodes, graph->roles.layers).size();
            CHECK(!of.concurrent || concurrent == own);
        }
    }
}

// Logits of each call's last token, and of all tokens of steps of all sequences. steps: tokens one by one, at the end
std::vector<float> decode(const File& file, const lkv::SessionOptions& options, const lkv::GpuOptions& gpu, int prompt,
                          int steps = 0) {
    const auto model = open(file, gpu);
    lkv::Session session(model, options);
    CHECK(session.implementation().starts_with("fused cuda") == (gpu.n_gpu_layers > 0));
    CHECK(model->n_host_layers() == std::max(0, model->hparams().n_layer - gpu.n_gpu_layers));
    std::vector<float> logits;
    std::vector<int32_t> length(static_cast<size_t>(options.n_seq_max), 0);
    const auto run = [&](int n, std::vector<int32_t> of, bool all = false) {
        std::vector<int32_t> tokens, pos, seq;
        for (int i = 0; i < n; i++) {
            const int32_t s = of[static_cast<size_t>(i) % of.size()];
            const int32_t at = length[static_cast<size_t>(s)]++;
            tokens.push_back((at * 37 + s * 11 + at * at) % n_vocab);
            pos.push_back(at);
            seq.push_back(s);
        }
        std::vector<uint8_t> output(tokens.size(), all ? 1 : 0);
        output.back() = 1;
        const size_t n_logits = (all ? tokens.size() : 1) * n_vocab;
        logits.resize(logits.size() + n_logits);
        session.decode(tokens, pos, seq, output, logits.data() + logits.size() - n_logits);
    };
    // Two of three guesses are taken back.
    const auto run_guesses = [&] {
        int32_t& end = length[0];
        const std::vector<int32_t> tokens = {5, 6, 7, 8}, pos = {end, end + 1, end + 2, end + 3}, seq(4, 0);
        const std::vector<uint8_t> output(4, 1);
        std::vector<float> all(4 * n_vocab);
        session.decode(tokens, pos, seq, output, [&](size_t) { return all.data(); }, {}, 3);
        end += 2;
        CHECK(session.cache().remove(0, {end}));
        run(1, {0});
    };
    if (options.prefill == "lazy") {
        run(prompt, {1, 0});
    } else {
        run(1, {0});
        run(1, {0});
        run(prompt, {0});
    }
    run(1, {0});
    run(9, {1});
    run(6, {0, 1});
    if (options.n_guesses > 0) run_guesses();
    if (session.cache().states().is_used()) {
        for (const int s : {0, 1}) {
            int32_t& end = length[static_cast<size_t>(s)];
            end = session.cache().resumable(s, end - 1);
            CHECK(end > 0 && session.cache().remove(s, {end}));
        }
    } else {
        CHECK(session.cache().remove(0, {20, 30}));
        CHECK(session.cache().remove(1, {3}));
        length[1] = 3;
    }
    run(32, {0});
    run(1, {1});
    if (!options.prefill.empty()) {
        const std::vector<uint8_t> state = session.state();
        session.cache().clear();
        session.set_state(state);
        CHECK(session.state() == state);
    }
    run(2, {1, 0});
    if (prompt > 128) {  // behind a context; of two sequences, in pieces
        run(prompt, {0});
        run(prompt, {1, 0});
        run(1, {1});
    }
    if (options.n_seq_max > 3) {  // steps of all sequences, and of one of them beside the others
        std::vector<int32_t> all(static_cast<size_t>(options.n_seq_max));
        std::iota(all.begin(), all.end(), 0);
        for (const int32_t s : all) run(24 + s, {s});
        for (int i = 0; i < 2; i++) run(options.n_seq_max, all, true);
        run(12, {1});
        if (options.n_seq_max > 16) {  // deeper, where a token reads its own sequence's slots alone; and back again
            for (const int32_t s : all) run(64, {s});
            for (int i = 0; i < 2; i++) run(options.n_seq_max, all, true);
            for (const int32_t s : all) CHECK(session.cache().remove(s, {40}));
            for (int32_t& end : length) end = std::min(end, 40);
            run(options.n_seq_max, all, true);
        }
    }
    for (int i = 0; i < steps; i++) run(1, {0});
    return logits;
}

// The calls, of those whose last tokens' logits `got` and `want` are, that differ by more than `tolerance`.
std::string unlike_calls(const std::vector<float>& got, const std::vector<float>& want, double tolerance) {
    std::string calls;
    for (size_t at = 0; at < want.size(); at += n_vocab) {
        const auto part = [at](const std::vector<float>& all) {
            return std::vector<float>(all.begin() + static_cast<ptrdiff_t>(at),
                                      all.begin() + static_cast<ptrdiff_t>(at + n_vocab));
        };
        const double error = relative_error(part(got), part(want));
        if (error > tolerance) calls += " " + std::to_string(at / n_vocab) + ": " + std::to_string(error);
    }
    return calls;
}

// Whether the combination is a legal one.
bool compare(const File& file, const Combination& c, int n_gpu_layers = 99) {
    std::vector<float> want;
    try {
        want = decode(file, c.options, on_gpu(0), c.prompt);
    } catch (const std::exception&) {
        return false;
    }
    std::vector<float> got(want.size(), NAN);
    try {
        got = decode(file, c.options, on_gpu(n_gpu_layers), c.prompt);
    } catch (const std::exception& e) {
        CHECK_MSG(false, c.name + ": " + e.what());
    }
    lkv::SessionOptions exact = c.options;
    exact.kv_k = exact.kv_v = "";
    exact.kv = exact.kv_sink = exact.kv_recent = "f32";
    exact.k_plan = exact.v_plan = {};
    // Values that differ by rounding have other codes where they lie at the border of two: a share of what the formats cost.
    const double formats = relative_error(want, decode(file, exact, on_gpu(0), c.prompt));
    const double error = relative_error(got, want);
    double tolerance = 4e-3 + share_of_formats * formats;
    // One code of two bits can be more than that: as much as it is between CPUs whose weights differ by the rounding of TF32, in which
    // ggml-cuda multiplies f32 weights with few tokens (ten bits of mantissa).
    for (unsigned i = 1; i <= 8 && error > tolerance; i++) {
        tolerance = std::max(tolerance,
                             1.2 * relative_error(want, decode(file.twin(5e-4F, i), c.options, on_gpu(0), c.prompt)));
    }
    CHECK_MSG(error <= tolerance, c.name + ": relative error " + std::to_string(error) + ", the formats cost " +
                                      std::to_string(formats) + ", calls" + unlike_calls(got, want, tolerance));
    return true;
}

// Eviction: what every layer has kept of the middle after the same calls, and logits of each call's last token.
struct Kept {
    std::vector<std::vector<std::pair<int32_t, uint64_t>>> tokens;  // of every layer: position and sequence, sorted
    std::vector<float> masses;                                      // in that order
    std::vector<float> logits;
};

class Evicting {
public:
    Evicting(const File& file, const lkv::SessionOptions& options, int n_gpu_layers)
        : session_(open(file, on_gpu(n_gpu_layers)), options) {}

    // n tokens, of these sequences in turn
    void run(int n, const std::vector<int32_t>& of) {
        std::vector<int32_t> tokens, pos, seq;
        for (int i = 0; i < n; i++) {
            const int32_t s = of[static_cast<size_t>(i) % of.size()];
            const int32_t at = length_[static_cast<size_t>(s)]++;
            tokens.push_back((at * 37 + s * 11 + at * at) % n_vocab);
            pos.push_back(at);
            seq.push_back(s);
        }
        std::vector<uint8_t> output(tokens.size(), 0);
        output.back() = 1;
        logits_.resize(logits_.size() + n_vocab);
        session_.decode(tokens, pos, seq, output, logits_.data() + logits_.size() - n_vocab);
    }
    std::vector<uint8_t> state() const { return session_.state(); }
    void resume(const std::vector<uint8_t>& state) { session_.set_state(state); }
    Kept kept() const {
        Kept kept;
        const lkv::Eviction& eviction = *session_.placement().eviction();
        for (int il = 0; il < session_.placement().n_layers(); il++) {
            if (!eviction.evicts(il)) continue;
            const lkv::Cells& cells = eviction.cells(il);
            std::vector<std::tuple<int32_t, uint64_t, float>> tokens;
            for (int slot = 0; slot < cells.end(); slot++) {
                if (cells.used(slot)) tokens.emplace_back(cells.pos(slot), cells.seq(slot), eviction.mass(il)[slot]);
            }
            std::sort(tokens.begin(), tokens.end());
            kept.tokens.emplace_back();
            for (const auto& [pos, seq, mass] : tokens) {
                kept.tokens.back().emplace_back(pos, seq);
                kept.masses.push_back(std::isinf(mass) ? -1.0F : mass);  // stays
            }
        }
        kept.logits = logits_;
        return kept;
    }

private:
    lkv::Session session_;
    std::vector<int32_t> length_ = std::vector<int32_t>(2, 0);
    std::vector<float> logits_;
};

struct Difference {
    int tokens;  // that one has kept and not the other
    double logits;
    double masses;  // where the tokens are the same
};

Difference difference(const Kept& want, const Kept& got) {
    Difference d{0, relative_error(got.logits, want.logits), 0.0};
    for (size_t il = 0; il < want.tokens.size(); il++) {
        std::vector<std::pair<int32_t, uint64_t>> others;
        std::set_symmetric_difference(want.tokens[il].begin(), want.tokens[il].end(), got.tokens[il].begin(),
                                      got.tokens[il].end(), std::back_inserter(others));
        d.tokens += static_cast<int>(others.size());
    }
    if (d.tokens == 0) d.masses = relative_error(got.masses, want.masses);
    return d;
}

// The same calls of both. swap: each goes on from the other's state
std::vector<Difference> differences(Evicting& a, Evicting& b, bool swap) {
    std::vector<Difference> found;
    const auto both = [&](int n, const std::vector<int32_t>& of) {
        a.run(n, of);
        b.run(n, of);
    };
    both(100, {0});
    for (int i = 0; i < 4; i++) both(1, {0});
    found.push_back(difference(a.kept(), b.kept()));
    both(20, {1});
    both(4, {0, 1});
    if (swap) {
        const std::vector<uint8_t> state = a.state();
        a.resume(b.state());
        b.resume(state);
    }
    both(16, {0});
    both(1, {1});
    found.push_back(difference(a.kept(), b.kept()));
    return found;
}

// A GPU's session evicts what the CPU's does.
void evictions(const Shape& shape, const char* policy, int recent) {
    const File file(shape, 1);
    lkv::SessionOptions options;
    options.n_ctx = 256;
    options.n_seq_max = 2;
    options.n_threads = 1;
    options.evict = policy;
    options.recent = recent;
    options.keep_tokens = std::to_string(4 + recent + 64);
    options.kv = "f16";
    Evicting cpu(file, options, 0);
    Evicting gpu(file, options, 99);
    const std::vector<Difference> got = differences(cpu, gpu, true);
    std::vector<Difference> most(got.size(), {0, 4e-3, 4e-3});
    const auto fits = [&] {
        bool all = true;
        for (size_t i = 0; i < got.size(); i++) {
            all = all && got[i].tokens <= most[i].tokens && got[i].logits <= most[i].logits &&
                  got[i].masses <= most[i].masses;
        }
        return all;
    };
    // Which of two tokens goes may hang on a rounding: as many are others between CPUs whose weights differ as TF32 rounds them.
    for (unsigned i = 1; i <= 4 && !fits(); i++) {
        const File twin = file.twin(5e-4F, i);
        Evicting one(file, options, 0);
        Evicting other(twin, options, 0);
        const std::vector<Difference> rounded = differences(one, other, false);
        for (size_t k = 0; k < most.size(); k++) {
            most[k].tokens = std::max(most[k].tokens, rounded[k].tokens);
            most[k].logits = std::max(most[k].logits, 1.2 * rounded[k].logits);
            most[k].masses = std::max(most[k].masses, 1.2 * rounded[k].masses);
        }
    }
    for (size_t i = 0; i < got.size(); i++) {
        CHECK_MSG(fits(), std::string(policy) + ", " + shape.k_path + "/" + shape.v_path +
                              (i == 0 ? ", one sequence: " : ", two sequences: ") + std::to_string(got[i].tokens) +
                              " other tokens stay, relative error of logits " + std::to_string(got[i].logits) +
                              ", of masses " + std::to_string(got[i].masses));
    }
}

// Layers on two GPUs, or all on the second one, say what they say on the first one, behind a layer on the CPU, too.
class Across {
public:
    // steps: single tokens at the end, which are a recorded graph's
    Across(Shape shape, unsigned seed, int steps)
        : shape_([&] {
              shape.n_layer = 3;
              return shape;
          }()),
          file_(shape_, seed),
          steps_(steps) {
        options_.n_ctx = 1024;
        options_.n_seq_max = 2;
        options_.n_threads = 1;
        options_.kv = "q4";
    }
    void two_and_one() const { same(on_gpu(99), {99, {2, 1}}, 40, "two layers and one"); }
    void all_on_second() const { same(on_gpu(99), on_gpu(99, 1), 40, "all on the second GPU"); }
    void behind_the_cpu() const { same(on_gpu(2), {2, {1, 1}}, 40, "the CPU and two GPUs"); }
    void long_ubatches() const { same(on_gpu(99), {99, {1, 2}}, 129, "long ubatches, one layer and two"); }
    void lazily() {
        options_.prefill = "lazy";
        same(on_gpu(99), on_gpu(99, 1), 40, "lazily, all on the second GPU");
        refused({99, {1, 1}},
                "[prefill] expected all layers on one device for lazy; got layers 0 to 1 on GPU 0, 2 to 2");
        refused(on_gpu(2),
                "[prefill] expected all layers on one device for lazy; got layers 0 to 0 on the CPU, 1 to 2");
        options_.prefill = "";
    }
    void evicting() {
        options_.evict = "h2o";
        options_.keep_tokens = "256";
        refused({99, {1, 1}}, "[evict] expected all layers on one device; got layers 0 to 1 on GPU 0, 2 to 2 on GPU 1");
        options_.evict = options_.keep_tokens = "";
    }

private:
    void same(const lkv::GpuOptions& one, const lkv::GpuOptions& other, int prompt, const char* what) const {
        const std::vector<float> want = decode(file_, options_, one, prompt, steps_);
        const double error = relative_error(decode(file_, options_, other, prompt, steps_), want);
        CHECK_MSG(error <= most_across, std::string(shape_.k_path) + "/" + shape_.v_path + ", " + what +
                                            ": relative error " + std::to_string(error));
    }
    void refused(const lkv::GpuOptions& gpu, const std::string& with) const {
        std::string said = "nothing";
        try {
            const lkv::Session session(open(file_, gpu), options_);
        } catch (const lkv::Error& e) {
            said = e.what();
        }
        CHECK_MSG(said.starts_with(with), said);
    }

    Shape shape_;
    File file_;
    int steps_;
    lkv::SessionOptions options_;
};

// thorough: every shape in every place, where a GPU computes
int across(bool thorough) {
    if (n_gpus < 2) {
        std::printf("gpu_across: skipped: one GPU\n");
        return 77;
    }
    const int steps = thorough ? 12 : 2;
    Across encoded(shapes[2], 1, steps);
    Across full(shapes[7], 2, steps);
    Across ring(shapes[27], 3, steps);
    Across hybrid(*std::find_if(std::begin(shapes), std::end(shapes), [](const Shape& s) { return s.hybrid; }), 4,
                  steps);
    Across mla(*std::find_if(std::begin(shapes), std::end(shapes), [](const Shape& s) { return s.turned > 0; }), 5,
               steps);
    mla.two_and_one();
    ring.two_and_one();
    ring.evicting();
    full.behind_the_cpu();
    full.lazily();
    encoded.long_ubatches();
    hybrid.two_and_one();
    hybrid.behind_the_cpu();
    for (Across* of : {&encoded, &full, &ring, &hybrid, &mla}) {
        if (!thorough) break;
        of->two_and_one();
        of->all_on_second();
        of->behind_the_cpu();
        of->long_ubatches();
    }
    return lkv::test::report("gpu_across");
}

// A state does not know where its layers were: what a session with both devices saved goes on in others as in its own.
void move_states(const File& file, const lkv::SessionOptions& options, const std::string& name) {
    std::vector<lkv::GpuOptions> places = {on_gpu(1), on_gpu(99), on_gpu(0)};
    if (n_gpus > 1) places.push_back({99, {1, 1}});
    std::vector<std::unique_ptr<lkv::Session>> sessions;
    for (const lkv::GpuOptions& gpu : places) {
        sessions.push_back(std::make_unique<lkv::Session>(open(file, gpu), options));
    }
    std::vector<int32_t> tokens(70), pos(70);
    std::iota(tokens.begin(), tokens.end(), 3);
    std::iota(pos.begin(), pos.end(), 0);
    std::vector<float> want(n_vocab), got(n_vocab);
    const std::vector<int32_t> seq(70, 0);
    const std::vector<uint8_t> none(70, 0);
    sessions[0]->decode(tokens, pos, seq, none, static_cast<float*>(nullptr));
    const std::vector<uint8_t> state = sessions[0]->state();
    const auto next = [&](lkv::Session& session, std::vector<float>& logits) {
        const int32_t token = 5, at = 70, sequence = 0;
        const uint8_t output = 1;
        session.decode(std::span(&token, 1), std::span(&at, 1), std::span(&sequence, 1), std::span(&output, 1),
                       logits.data());
    };
    next(*sessions[0], want);
    sessions[0]->cache().clear();
    for (const auto& session : sessions) {
        session->set_state(state);
        CHECK(session->state() == state);
        std::fill(got.begin(), got.end(), NAN);
        next(*session, got);
        const double error = relative_error(got, want);
        // q4 rows that are keys and values in one: 4.01e-3
        CHECK_MSG(error < 6e-3, "a state of " + name + ": relative error " + std::to_string(error));
    }
    sessions[0]->cache().clear();
    CHECK(sessions[0]->set_seq_state(1, sessions[1]->seq_state(0)).empty());
    CHECK(sessions[0]->placement().last(1) == 70);
}

}  // namespace

// evictions, or across [largest relative error], or [rounds: combinations of every shape] [seed] [share of what formats cost] [first shape, from 0] [shapes]
// Logits of a few tokens, in a session of its own.
std::vector<float> few_tokens(const std::shared_ptr<const lkv::Model>& model, const lkv::SessionOptions& options) {
    lkv::Session session(model, options);
    std::vector<float> logits(2 * n_vocab);
    const std::vector<int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6}, pos = {0, 1, 2, 3, 4, 5, 6, 7}, seq(8, 0);
    session.decode(tokens, pos, seq, std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 0, 1}, logits.data());
    session.decode(std::vector<int32_t>{5}, std::vector<int32_t>{8}, std::vector<int32_t>{0}, std::vector<uint8_t>{1},
                   logits.data() + n_vocab);
    return logits;
}

// Every allocation on the GPU fails once: each time one line says so, and what was open before goes on as if nothing had happened.
void memory_runs_out(const Shape& shape) {
    const File file(shape, 1);
    lkv::SessionOptions options;
    options.n_ctx = 256;
    options.n_threads = 1;
    options.n_ubatch = 16;
    const auto before = open(file, on_gpu(99));
    const std::vector<float> want = few_tokens(before, options);
    int n_refused = 0;
    for (bool found_all = false; !found_all && n_refused < 1000;) {
        emulated_fail_allocation(n_refused + 1);
        try {
            few_tokens(open(file, on_gpu(99)), options);
            found_all = true;
        } catch (const std::exception& e) {
            const std::string said = e.what();
            CHECK_MSG(said.starts_with("[memory] expected ") && said.find('\n') == std::string::npos, said);
            n_refused++;
        }
        emulated_fail_allocation(0);
        if (n_refused % 8 == 0) CHECK(few_tokens(before, options) == want);
    }
    CHECK(few_tokens(before, options) == want);
    CHECK(n_refused > 5);
}

// A sequence's state takes its own rows from the GPU and puts them there, wherever they are among those of `n_seq` sequences, and whatever
// else the cache has room for.
void states_copy_their_rows(const Shape& shape, int n_seq) {
    const File file(shape, 1);
    lkv::SessionOptions options;
    options.n_ctx = 16384;
    options.n_seq_max = n_seq;
    options.n_threads = 1;
    lkv::Session session(open(file, on_gpu(99)), options);
    const int n = 40 * n_seq;
    std::vector<int32_t> tokens, pos, seq;
    for (int i = 0; i < n; i++) {  // of all sequences in turn
        tokens.push_back(i * 7 % n_vocab);
        pos.push_back(i / n_seq);
        seq.push_back(i % n_seq);
    }
    session.decode(tokens, pos, seq, std::vector<uint8_t>(tokens.size(), 0), static_cast<float*>(nullptr));
    size_t before = emulated_copied_bytes();
    const auto copied = [&] { return emulated_copied_bytes() - std::exchange(before, emulated_copied_bytes()); };
    const std::vector<uint8_t> state = session.seq_state(1);
    const size_t read = copied();
    const auto next = [&] {
        std::vector<float> logits(n_vocab);
        session.decode(std::vector<int32_t>{5}, std::vector<int32_t>{40}, std::vector<int32_t>{1},
                       std::vector<uint8_t>{1}, logits.data());
        return logits;
    };
    const std::vector<float> want = next();
    copied();
    session.set_seq_state(1, state);
    const size_t written = copied();
    CHECK(relative_error(next(), want) < 1e-5);
    const std::string of = " of a state of " + std::to_string(state.size());
    CHECK_MSG(read > 0 && read < 4 * state.size(), std::to_string(read) + of);
    CHECK_MSG(written > 0 && written < 4 * state.size(), std::to_string(written) + of);
}

int main(int argc, char** argv) {
    std::string why;
    n_gpus = lkv::count_gpus(why);
    if (n_gpus == 0) {
        std::printf("gpu_session: skipped: %s\n", why.c_str());
        return 77;
    }
    if (argc > 1 && std::string(argv[1]) == "across") {
        if (argc > 2) most_across = std::atof(argv[2]);
        return across(most_across > 0.0);
    }
    if (argc > 1 && std::string(argv[1]) == "roles") {
        for (int i = 2; i < argc; i++) roles(argv[i]);
        for (const Shape& shape : shapes) {
            if (argc == 2) roles(File(shape, 7).path());
        }
        return lkv::test::report("gpu_roles");
    }
    if (argc > 1 && std::string(argv[1]) == "memory") {
        if (emulated_fail_allocation == nullptr) {
            std::printf("gpu_memory: skipped: a GPU cannot be told to find no memory; the emulated one can\n");
            return 77;
        }
        for (const size_t shape : {2, 4, 7, 27}) {
            for (const int n_seq : {2, 20}) states_copy_their_rows(shapes[shape], n_seq);
        }
        for (const size_t shape : {2, 4, 7, 27}) memory_runs_out(shapes[shape]);
        return lkv::test::report("gpu_memory");
    }
    if (argc > 1 && std::string(argv[1]) == "evictions") {
        evictions(shapes[4], "h2o", 8);
        evictions(shapes[22], "keyformer", 0);
        evictions(shapes[16], "h2o", 0);  // beside a ring
        evictions(shapes[33], "snapkv", 8);
        evictions(*std::find_if(std::begin(shapes), std::end(shapes), [](const Shape& s) { return s.turned > 0; }),
                  "h2o", 8);
        return lkv::test::report("gpu_evictions");
    }
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 1;
    std::mt19937 random(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1);
    if (argc > 3) share_of_formats = std::atof(argv[3]);
    const size_t first = argc > 4 ? std::strtoul(argv[4], nullptr, 10) : 0;
    const size_t count = argc > 5 ? std::strtoul(argv[5], nullptr, 10) : std::size(shapes);
    for (const Shape& shape : shapes) {
        // drawn for those that are left out, too: what the others are tried with stays as it is
        const unsigned seed = random();
        std::vector<Combination> drawn;
        for (int i = 0; i < rounds; i++) drawn.push_back(combination(random, shape));
        const auto number = static_cast<size_t>(&shape - shapes);
        if (number < first || number - first >= count) continue;
        const File file(shape, seed);
        // what a file with windows is opened with most often beside its own
        Combination none{.options = {}, .name = std::string(shape.k_path) + "/" + shape.v_path + ", no windows"};
        none.options.n_ctx = 256;
        none.options.n_seq_max = 2;
        none.options.n_threads = 1;
        none.options.sink = none.options.recent = 0;
        none.options.n_guesses = shape.hybrid ? 3 : 0;
        compare(file, none);
        // ubatches longer than what the recent region takes at once; of the same format everywhere, as the GPU attends to exact rows where
        // the CPU does to those that it has settled
        Combination prompt = none;
        prompt.name = std::string(shape.k_path) + "/" + shape.v_path + ", long ubatches";
        prompt.prompt = 150;
        prompt.options.n_ctx = 1024;
        prompt.options.sink = prompt.options.recent = -1;
        prompt.options.kv = "f16";
        if (shape.encoded != Shape::random) compare(file, prompt);
        if (&shape == shapes) {  // a window of more tokens than enter the recent region without a longer one
            prompt.name += ", 160 recent tokens";
            prompt.prompt = 400;
            prompt.options.n_ctx = 2048;
            prompt.options.recent = 160;
            CHECK_MSG(compare(file, prompt), prompt.name + ": not a legal one");
        }
        if (&shape == first_encoded("rebuild") || &shape == first_encoded("rotated")) {
            Combination many = none;
            many.name = std::string(shape.k_path) + "/" + shape.v_path + ", twelve sequences";
            many.options.n_ctx = 1024;
            many.options.n_seq_max = 12;
            many.options.sink = 2;
            many.options.recent = 16;
            CHECK_MSG(compare(file, many), many.name + ": not a legal one");
        }
        // so many tokens of its heads expand latents, unless they read their own slots
        if (&shape == std::end(shapes) - 1) {
            Combination many = none;
            many.name = "wide latents, 25 sequences";
            many.options.n_ctx = 8192;
            many.options.n_seq_max = 25;
            many.options.sink = 2;
            many.options.recent = 16;
            CHECK_MSG(compare(file, many), many.name + ": not a legal one");
        }
        if (&shape == first_encoded("rotated")) {
            Combination narrow = none;  // latents narrower than two heads, which 512 tokens expand
            narrow.name = "rotated/latent, a long ubatch";
            narrow.prompt = 520;
            narrow.options.n_ctx = 2048;
            narrow.options.n_ubatch = 1024;
            CHECK_MSG(compare(file, narrow), narrow.name + ": not a legal one");
        }
        if (shape.k_path == std::string("full") && shape.v_path == std::string("full")) {
            Combination rotated = none;
            rotated.name = "full/full, rotated rows in q4_0";
            rotated.options.kv = "q4_0";
            CHECK_MSG(compare(file, rotated), rotated.name + ": not a legal one");
        }
        if (splits(shape)) {
            Combination both = none;
            both.name = std::string(shape.k_path) + "/" + shape.v_path + ", the first layer on the CPU";
            both.options.sink = both.options.recent = -1;
            both.options.kv = "q4";
            compare(file, both, 1);
            both.options.n_ubatch = 16;  // of which the ring's slots depend
            if (shape.unlike || shape.hybrid || shape.turned > 0) move_states(file, both.options, both.name);
        }
        if (shape.unlike) {
            const int slots = 64;  // two windows and a ubatch, whole tiles
            Combination ring = none;
            ring.name = std::string(shape.k_path) + "/" + shape.v_path + ", a ring that is filled several times";
            ring.prompt = 100;
            ring.options.n_ctx = 512;
            ring.options.n_ubatch = 16;
            CHECK(ring_slots(file, ring.options) == slots);
            compare(file, ring);
            ring.options.sink = ring.options.recent = -1;
            ring.options.recent = 8;
            ring.name += " beside exact windows";
            CHECK(ring_slots(file, ring.options) == slots);
            compare(file, ring);
            ring.options.kv = "";
            ring.options.kv_k = "c4";
            ring.options.kv_v = "q4";
            ring.name += ", K of other layers in blocks of tokens";
            CHECK(ring_slots(file, ring.options) == slots);
            CHECK_MSG(compare(file, ring) || shape.k_path != std::string("full"), ring.name + ": not a legal one");
        }
        for (const char* prefill : {"eager", "lazy"}) {
            if (!in_token_blocks(number, prefill)) continue;
            Combination blocks = none;
            blocks.name = std::string(shape.k_path) + "/" + shape.v_path + ", K in blocks of tokens, " + prefill;
            blocks.prompt =
                prefill == std::string("lazy") ? 84 : 48;  // a block of every sequence, and a few tokens more
            blocks.options.prefill = prefill;
            blocks.options.recent = 8;
            blocks.options.n_ubatch = 20;  // an eager prompt sees tokens that are compressed
            blocks.options.kv_k = "c3";
            blocks.options.kv_v = "q3";
            CHECK_MSG(compare(file, blocks), blocks.name + ": not a legal one");
        }
        for (const Combination& c : drawn) compare(file, c);
    }
    return lkv::test::report("gpu_session");
}
