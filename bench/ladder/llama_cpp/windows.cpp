// llama.cpp decodes windows of tokens with one of its caches: llama-windows MODEL K V GPU_LAYERS THREADS
//
// Standard input, i32: windows, tokens of each, the first position that is scored, then the tokens of one window after
// another. Standard output, f32: logits [windows, n_vocab] of every position from there to the last but one.
// Windows are decoded as bench/answering/decoded.py does: what comes before in batches, then all together.

#include <llama.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr uint32_t ubatch = 128;  // of bench/answering/answers.py, as is what a sequence may take beyond its tokens
constexpr uint32_t slack = 64;

[[noreturn]] void fail(const std::string& why) {
    std::fprintf(stderr, "error: [llama-windows] %s\n", why.c_str());
    std::exit(2);
}

struct Windows {
    int32_t count, length, first;
    std::vector<llama_token> tokens;

    llama_token at(int32_t window, int32_t position) const { return tokens[size_t(window) * length + position]; }
};

Windows read_windows() {
    Windows read{};
    if (std::fread(&read, sizeof(int32_t), 3, stdin) != 3) fail("expected windows on standard input; got none");
    if (read.count < 1 || read.length < 2 || read.first < 0 || read.first > read.length - 1)
        fail("expected windows with a position to score; got " + std::to_string(read.count) + " of " +
             std::to_string(read.length) + " tokens from " + std::to_string(read.first));
    read.tokens.resize(size_t(read.count) * read.length);
    const size_t n_read = std::fread(read.tokens.data(), sizeof(llama_token), read.tokens.size(), stdin);
    if (n_read != read.tokens.size())
        fail("expected " + std::to_string(read.tokens.size()) + " tokens; got " + std::to_string(n_read));
    return read;
}

ggml_type type_named(const std::string& name) {
    for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
        const char* known = ggml_type_name(ggml_type(type));
        if (known && name == known) return ggml_type(type);
    }
    fail("expected a type of ggml; got " + name);
}

class Decoder {
public:
    Decoder(llama_model* model, const llama_context_params& params)
        : context_(llama_init_from_model(model, params), llama_free), batch_(llama_batch_init(ubatch, 0, 1)) {
        if (!context_) fail("expected a context; got none");
    }
    ~Decoder() { llama_batch_free(batch_); }
    Decoder(const Decoder&) = delete;
    Decoder& operator=(const Decoder&) = delete;

    void add(llama_token token, llama_pos position, llama_seq_id sequence, bool is_wanted) {
        const int32_t at = batch_.n_tokens++;
        batch_.token[at] = token;
        batch_.pos[at] = position;
        batch_.n_seq_id[at] = 1;
        batch_.seq_id[at][0] = sequence;
        batch_.logits[at] = is_wanted;
    }

    void decode() {
        const int32_t status = llama_decode(context_.get(), batch_);
        if (status != 0) fail("expected tokens to be decoded; got status " + std::to_string(status));
        batch_.n_tokens = 0;
    }

    const float* logits(int32_t at) { return llama_get_logits_ith(context_.get(), at); }

private:
    std::unique_ptr<llama_context, decltype(&llama_free)> context_;
    llama_batch batch_;
};

void decode(Decoder& decoder, const Windows& windows, size_t n_vocab) {
    for (int32_t window = 0; window < windows.count; ++window) {
        for (int32_t begin = 0; begin < windows.first; begin += ubatch) {
            const int32_t end = std::min<int32_t>(begin + ubatch, windows.first);
            for (int32_t at = begin; at < end; ++at) decoder.add(windows.at(window, at), at, window, false);
            decoder.decode();
        }
    }
    for (int32_t at = windows.first; at < windows.length - 1; ++at) {
        for (int32_t window = 0; window < windows.count; ++window)
            decoder.add(windows.at(window, at), at, window, true);
        decoder.decode();
        for (int32_t window = 0; window < windows.count; ++window) {
            if (std::fwrite(decoder.logits(window), sizeof(float), n_vocab, stdout) != n_vocab)
                fail("expected to write logits; got an error");
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 6) fail("expected MODEL K V GPU_LAYERS THREADS; got " + std::to_string(argc - 1) + " arguments");
    const Windows windows = read_windows();
    if (windows.count > int32_t(ubatch)) fail("expected at most 128 windows; got " + std::to_string(windows.count));
    llama_log_set(
        [](ggml_log_level level, const char* text, void*) {
            if (level >= GGML_LOG_LEVEL_WARN) std::fputs(text, stderr);
        },
        nullptr);
    llama_backend_init();
    llama_model_params of_model = llama_model_default_params();
    of_model.n_gpu_layers = std::atoi(argv[4]);
    of_model.use_extra_bufts = false;  // weights as they are, not repacked
    const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(llama_model_load_from_file(argv[1], of_model),
                                                                          llama_model_free);
    if (!model) fail(std::string("expected a model; got ") + argv[1]);
    llama_context_params params = llama_context_default_params();
    params.n_seq_max = uint32_t(windows.count);
    params.n_ctx = params.n_seq_max * (uint32_t(windows.length) + slack);
    params.n_batch = params.n_ubatch = ubatch;
    if (const int n_threads = std::atoi(argv[5])) params.n_threads = params.n_threads_batch = n_threads;
    params.type_k = type_named(argv[2]);
    params.type_v = type_named(argv[3]);
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;  // which a quantized V needs
    Decoder decoder(model.get(), params);
    decode(decoder, windows, size_t(llama_vocab_n_tokens(llama_model_get_vocab(model.get()))));
    return 0;
}
