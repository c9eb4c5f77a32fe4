// Fuzzes files of latentkv: any bytes are opened as a model, and run, or refused with lkv::Error. The first byte of an input
// chooses what the rest is: a file in one piece, or the sidecar of a base.
// With clang: -fsanitize=fuzzer,address,undefined. Otherwise mutations of small files (mutate_gguf.h).
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "files/gguf_bytes.h"
#include "gguf/content_hash.h"
#include "gguf_schema.h"
#include "model/model.h"
#include "runtime/session.h"

namespace {

using lkv::test::Bytes;
using lkv::test::GgufBytes;
using lkv::test::GgufType;
using Words = std::vector<std::string>;
using Numbers = std::vector<uint32_t>;

enum Mode { whole, sidecar, n_modes };

// Two layers of width 32, two KV heads of 16 channels.
constexpr int64_t d = 32;
constexpr int64_t w = 32;
constexpr int64_t head = 16;

// One with Q, K and V packed, where the file has no latents beside it.
GgufBytes base_model(bool packed) {
    GgufBytes file;
    file.string("general.architecture", "llama")
        .value<uint32_t>("llama.block_count", GgufType::u32, 2)
        .value<uint32_t>("llama.embedding_length", GgufType::u32, d)
        .value<uint32_t>("llama.feed_forward_length", GgufType::u32, d)
        .value<uint32_t>("llama.attention.head_count", GgufType::u32, 2)
        .value<uint32_t>("llama.attention.head_count_kv", GgufType::u32, 2)
        .value<uint32_t>("llama.attention.key_length", GgufType::u32, head)
        .value<uint32_t>("llama.context_length", GgufType::u32, 64)
        .value<float>("llama.rope.freq_base", GgufType::f32, 10000.0F)
        .tensor("token_embd.weight", {d, 8}, GGML_TYPE_F16)
        .tensor("output_norm.weight", {d}, GGML_TYPE_F32);
    for (const std::string blk : {"blk.0.", "blk.1."}) {
        if (packed && blk == "blk.1.") {
            file.tensor(blk + "attn_qkv.weight", {d, 3 * w}, GGML_TYPE_Q8_0);
            file.tensor(blk + "attn_qkv.bias", {3 * w}, GGML_TYPE_F32);
        } else {
            file.tensor(blk + "attn_q.weight", {d, w}, GGML_TYPE_F16);
        }
        if (packed && blk == "blk.0.") {
            file.tensor(blk + "attn_k.weight", {d, w}, GGML_TYPE_F16);
            file.tensor(blk + "attn_v.weight", {d, w}, GGML_TYPE_Q4_0);
        }
        file.tensor(blk + "attn_norm.weight", {d}, GGML_TYPE_F32)
            .tensor(blk + "attn_output.weight", {w, d}, GGML_TYPE_F16)
            .tensor(blk + "ffn_norm.weight", {d}, GGML_TYPE_F32)
            .tensor(blk + "ffn_gate.weight", {d, d}, GGML_TYPE_Q8_0)
            .tensor(blk + "ffn_up.weight", {d, d}, GGML_TYPE_F16)
            .tensor(blk + "ffn_down.weight", {d, d}, GGML_TYPE_F16);
    }
    return file;
}

// A rebuilt K of form A in layer 0; a rotated one in layer 1, whose V shares one latent. Keys of a master file too.
void add_latents(GgufBytes& file) {
    file.value<uint32_t>(lkv::key::version, GgufType::u32, 1)
        .strings(std::string(lkv::key::k_path), {"rebuild", "rotated"})
        .strings(std::string(lkv::key::v_path), {"latent", "latent"})
        .array<uint32_t>(lkv::key::k_group, GgufType::u32, {2, 1})
        .array<uint32_t>(lkv::key::v_group, GgufType::u32, {1, 2})
        .array<uint32_t>(lkv::key::k_ranks, GgufType::u32, {32, 16, 16})
        .array<uint32_t>(lkv::key::v_ranks, GgufType::u32, {16, 16, 16})
        .array<uint32_t>(lkv::key::k_segment_counts, GgufType::u32, {2, 1, 1})
        .array<uint32_t>(lkv::key::k_segment_widths, GgufType::u32, {16, 16, 16, 16})
        .strings(std::string(lkv::key::k_segment_formats), {"q8", "q4", "q4", "f16"})
        .strings(std::string(lkv::key::v_segment_formats), {"q4", "q2", "q1"})
        .array<float>(lkv::key::k_energy, GgufType::f32, {0.9F, 0.8F})
        .value<uint32_t>(lkv::key::sink, GgufType::u32, 1)
        .value<uint32_t>(lkv::key::recent, GgufType::u32, 2)
        .strings(std::string(lkv::key::budget_formats), {"q8", "q4", "none"})
        .value<uint32_t>(lkv::key::budget_context, GgufType::u32, 64)
        .value<float>(lkv::key::budget_drop_penalty, GgufType::f32, 2.0F)
        .array<float>(lkv::key::k_segment_distortions, GgufType::f32, std::vector<float>(12, 0.5F))
        .array<float>(lkv::key::v_segment_distortions, GgufType::f32, std::vector<float>(9, 0.5F))
        .array<float>(lkv::key::budget_predicted, GgufType::f32, {1.0F, 2.0F})
        .array<float>(lkv::key::budget_kld, GgufType::f32, {1.0F, 2.0F})
        .strings(std::string(lkv::key::budget_exact_formats), {"f16", "q8"})
        .array<float>(lkv::key::budget_exact_kld, GgufType::f32, {0.0F, 0.1F})
        .tensor("blk.0.attn_k_a.weight", {d, 32}, GGML_TYPE_Q8_0)
        .tensor("blk.0.attn_k_a.bias", {32}, GGML_TYPE_F32)
        .tensor("blk.0.attn_k_b.weight", {32, w}, GGML_TYPE_F16)
        .tensor("blk.0.attn_v_a.weight", {d, 32}, GGML_TYPE_F16)
        .tensor("blk.0.attn_v_b.weight", {16, w}, GGML_TYPE_F16)
        .tensor("blk.1.attn_k_e.weight", {head, 32}, GGML_TYPE_F16)
        .tensor("blk.1.attn_q_e.weight", {head, 16, 2}, GGML_TYPE_F32)
        .tensor("blk.1.attn_v_e.weight", {2 * head, 16}, GGML_TYPE_F16)
        .tensor("blk.1.attn_v_b.weight", {16, w}, GGML_TYPE_F16);
}

Bytes whole_file() {
    GgufBytes file = base_model(false);
    file.tensor("blk.1.attn_k.weight", {d, w}, GGML_TYPE_F16).tensor("blk.1.attn_v.weight", {d, w}, GGML_TYPE_F16);
    add_latents(file);
    return file.bytes();
}

const Bytes& base_file() {
    static const Bytes bytes = base_model(true).bytes();
    return bytes;
}

Bytes sidecar_file() {
    GgufBytes file;
    file.string("general.architecture", "llama")
        .string(lkv::key::base_hash, lkv::content_hash(lkv::GgufFile(base_file())))
        .string(lkv::key::base_name, "base");
    add_latents(file);
    return file.bytes();
}

// A file in memory, with a path.
class MemoryFile {
public:
    MemoryFile() : file_(::memfd_create("model", 0)), path_("/proc/self/fd/" + std::to_string(file_)) {}
    ~MemoryFile() { ::close(file_); }
    MemoryFile(const MemoryFile&) = delete;
    MemoryFile& operator=(const MemoryFile&) = delete;

    const std::string& hold(std::span<const uint8_t> bytes) {
        const bool held = ::ftruncate(file_, static_cast<off_t>(bytes.size())) == 0 &&
                          ::pwrite(file_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
        if (!held) __builtin_trap();
        return path_;
    }

private:
    int file_;
    std::string path_;
};

// Refusals are the findings; what libraries say of them is not printed.
void be_quiet() {
    lkv::set_log_level(lkv::LogLevel::error);
    lkv::install_library_logging();
}

// A prompt and a step, and the state that they leave.
void run(std::shared_ptr<const lkv::Model> model) {
    lkv::SessionOptions options;
    options.n_ctx = 48;
    options.n_ubatch = 8;
    options.n_threads = 1;
    const auto n_vocab = static_cast<size_t>(model->hparams().n_vocab);
    lkv::Session session(std::move(model), options);
    std::vector<float> logits(n_vocab);
    const std::array<int32_t, 5> tokens = {0, 0, 0, 0, 0};
    const std::array<int32_t, 5> pos = {0, 1, 2, 3, 4};
    const std::array<int32_t, 5> seq = {0, 0, 0, 0, 0};
    const std::array<uint8_t, 5> last = {0, 0, 0, 1, 1};
    const auto first = [](const auto& all) { return std::span(all).first(4); };
    const auto next = [](const auto& all) { return std::span(all).last(1); };
    session.decode(first(tokens), first(pos), first(seq), first(last), logits.data());
    session.decode(next(tokens), next(pos), next(seq), next(last), logits.data());
    session.set_state(session.state());
}

// Why an input is refused; empty: it is not.
std::string refusal(std::span<const uint8_t> input) {
    static MemoryFile file;
    static MemoryFile base;
    static const std::string base_path = base.hold(base_file());
    if (input.empty()) return "no mode is named";
    const std::string& path = file.hold(input.subspan(1));
    lkv::ModelOptions options;
    options.use_mmap = false;  // sanitizers see its end
    const bool beside = input[0] % n_modes == sidecar;
    if (beside) options.latent_path = path;
    try {
        run(std::make_shared<const lkv::Model>(beside ? base_path : path, options));
        return {};
    } catch (const lkv::Error& error) {
        return error.what();
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    be_quiet();
    refusal({data, size});
    return 0;
}

#ifndef LKV_LIBFUZZER

#include <cstdio>

#include "fuzz/mutate_gguf.h"

namespace {

// What was found once: a type that ggml does not multiply by, or add, ended the process.
bool types_are_refused(const Bytes& file) {
    bool refused = true;
    for (const auto& [name, type] : {std::pair("blk.0.attn_k_b.weight", GGML_TYPE_I32),
                                     {"blk.0.attn_v_a.weight", GGML_TYPE_F64},
                                     {"blk.0.attn_k_a.bias", GGML_TYPE_F16}}) {
        const Bytes body(file.begin() + 1, file.end());
        lkv::test::GgufPieces pieces{lkv::GgufFile(body)};
        for (lkv::test::GgufPieces::Tensor& tensor : pieces.tensors) {
            if (tensor.name == name) tensor.type = type;
        }
        Bytes changed = pieces.bytes();
        changed.insert(changed.begin(), file[0]);
        const std::string expected = std::string("[gguf] expected ") + name;
        const std::string got = std::string("; got ") + ggml_type_name(type);
        const std::string said = refusal(changed);
        refused = refused && said.starts_with(expected) && said.ends_with(got);
        if (!refused)
            std::fprintf(stderr, "fuzz_model: expected \"%s ...%s\"; got \"%s\"\n", expected.c_str(), got.c_str(),
                         said.c_str());
    }
    return refused;
}

}  // namespace

int main(int argc, char** argv) {
    be_quiet();
    std::vector<Bytes> files = {whole_file(), sidecar_file()};
    for (size_t mode = 0; mode < files.size(); mode++) {
        files[mode].insert(files[mode].begin(), static_cast<uint8_t>(mode));
        if (const std::string refused = refusal(files[mode]); !refused.empty()) {
            std::fprintf(stderr, "fuzz_model: expected a model; got %s\n", refused.c_str());
            return 1;
        }
        if (!types_are_refused(files[mode])) return 1;
    }
    return lkv::test::fuzz(argc, argv,
                           {.name = "fuzz_model",
                            .files = files,
                            .read = refusal,
                            .fixed = 1,
                            .mutate_parts = lkv::test::mutate_gguf,
                            .less = lkv::test::less_of_gguf});
}

#endif
