// libllama's tokenizer and samplers behind our own checks: what would abort the process there is an Error here.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "files/gguf_bytes.h"
#include "files/gguf_check.h"
#include "gguf/reader.h"
#include "tokens/sampler.h"
#include "tokens/vocab.h"

using namespace lkv::test;
using lkv::GgufFile;
using lkv::Sampler;
using lkv::SamplerOptions;
using lkv::Vocab;

namespace {

constexpr int32_t normal = 1;
constexpr int32_t control = 3;
constexpr int32_t byte = 6;

// Byte-level BPE: printable ASCII, Ġ (space), Ċ (newline), a few merges, two special tokens; 100 ids.
struct BpeTokenizer {
    std::vector<std::string> tokens;
    std::vector<int32_t> types;
    std::vector<std::string> merges = {"t h", "th e", "Ġ the"};
    std::string pre = "gpt-2";
    bool add_bos = true;
    uint32_t bos = 0;
    uint32_t eos = 1;
    std::vector<int32_t> further_ends;

    BpeTokenizer() {
        tokens = {"<s>", "<|im_end|>", "Ġ", "Ċ", "th", "the", "Ġthe"};
        for (char c = '!'; c < '~'; ++c) tokens.emplace_back(1, c);
        types.assign(tokens.size(), normal);
        types[0] = types[1] = control;
    }

    Bytes bytes() const {
        GgufBytes file;
        file.string("general.architecture", "an architecture nobody has")
            .string("tokenizer.ggml.model", "gpt2")
            .string("tokenizer.ggml.pre", pre)
            .strings("tokenizer.ggml.tokens", tokens)
            .array("tokenizer.ggml.token_type", GgufType::i32, types)
            .strings("tokenizer.ggml.merges", merges)
            .value<uint32_t>("tokenizer.ggml.bos_token_id", GgufType::u32, bos)
            .value<uint32_t>("tokenizer.ggml.eos_token_id", GgufType::u32, eos)
            .value<uint8_t>("tokenizer.ggml.add_bos_token", GgufType::boolean, add_bos)
            .string("tokenizer.chat_template", "{{ messages }}")
            .value<uint32_t>("latentkv.version", GgufType::u32, 1)
            .tensor("x", {4}, GGML_TYPE_F32);
        if (!further_ends.empty()) file.array("tokenizer.ggml.eog_token_ids", GgufType::i32, further_ends);
        return file.bytes();
    }
};

Vocab load(const Bytes& bytes) { return Vocab::from(GgufFile(bytes)).value(); }

void test_bpe() {
    const BpeTokenizer tokenizer;
    const Vocab vocab = load(tokenizer.bytes());
    const auto id = [&](std::string_view text) { return vocab.find_token(text); };

    CHECK(vocab.n_tokens() == static_cast<int32_t>(tokenizer.tokens.size()));
    CHECK(vocab.bos() == 0 && vocab.eos() == 1 && vocab.nl() == 3 && vocab.add_bos());
    CHECK(vocab.is_eog(1) && !vocab.is_eog(0));
    BpeTokenizer several;
    several.further_ends = {0, 5};
    CHECK(load(several.bytes()).is_eog(0) && load(several.bytes()).is_eog(5) && !load(several.bytes()).is_eog(6));
    CHECK(vocab.chat_template() == "{{ messages }}");
    CHECK(id("Ġthe") == 6 && id("absent") == -1);

    CHECK((vocab.tokenize("the the", false, false) == std::vector<int32_t>{id("the"), id("Ġthe")}));
    CHECK((vocab.tokenize("the", true, false) == std::vector<int32_t>{0, id("the")}));
    CHECK((vocab.tokenize("a<s>", false, true) == std::vector<int32_t>{id("a"), 0}));
    CHECK((vocab.tokenize("<s>", false, false) == std::vector<int32_t>{id("<"), id("s"), id(">")}));
    CHECK(vocab.tokenize("", false, false).empty());

    const std::string text = "see the cat,\n  then the hat ! ok";
    CHECK(vocab.detokenize(vocab.tokenize(text, true, false)) == text);
    std::string longer;
    for (int i = 0; i < 500; ++i) longer += "x y\n";  // more tokens than the first guess
    CHECK(vocab.detokenize(vocab.tokenize(longer, false, false)) == longer);
    CHECK(vocab.token_to_piece(1).empty() && vocab.token_to_piece(1, true) == "<|im_end|>");
    CHECK(vocab.token_to_piece(6) == " the");

    CHECK_REFUSED("[vocab] expected a token id from 0 to 99; got 100", vocab.token_to_piece(100));
    CHECK_REFUSED("got -1", vocab.is_eog(-1));
    CHECK_REFUSED("got 100", vocab.detokenize(std::vector<int32_t>{5, 100}));
}

// SentencePiece: a space before the text, bytes for what has no token.
void test_sentencepiece() {
    std::vector<std::string> tokens = {"<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁ab"};
    std::vector<float> scores = {0, 0, 0, -3, -4, -5, -1, -0.5f};
    std::vector<int32_t> types = {2, control, control, normal, normal, normal, normal, normal};
    constexpr std::string_view hex = "0123456789ABCDEF";
    for (int i = 0; i < 256; ++i) {
        tokens.push_back(std::string("<0x") + hex[i / 16] + hex[i % 16] + ">");
        scores.push_back(0);
        types.push_back(byte);
    }
    GgufBytes file;
    file.string("tokenizer.ggml.model", "llama")
        .strings("tokenizer.ggml.tokens", tokens)
        .array("tokenizer.ggml.scores", GgufType::f32, scores)
        .array("tokenizer.ggml.token_type", GgufType::i32, types);
    const Vocab vocab = load(file.bytes());
    CHECK((vocab.tokenize("ab a", true, false) == std::vector<int32_t>{1, 7, 6}));
    CHECK(vocab.detokenize(std::vector<int32_t>{1, 7, 6}) == "ab a");  // after BOS: the text as it was
    CHECK(vocab.detokenize(std::vector<int32_t>{7, 6}) == " ab a");    // in the middle of a text: the space counts
    CHECK(vocab.detokenize(vocab.tokenize("a→\n", true, false)) == "a→\n");
}

void test_refused_vocabularies() {
    CHECK(!Vocab::from(GgufFile(sample_file().bytes())).has_value());
    GgufBytes none;
    none.string("tokenizer.ggml.model", "none");
    CHECK(!Vocab::from(GgufFile(none.bytes())).has_value());

    GgufBytes rwkv;
    rwkv.string("tokenizer.ggml.model", "rwkv");
    CHECK_REFUSED("to be llama, gpt2, t5 or gemma4; got 'rwkv'", load(rwkv.bytes()));
    GgufBytes bare;
    bare.string("tokenizer.ggml.model", "gpt2");
    CHECK_REFUSED("expected the key 'tokenizer.ggml.tokens'", load(bare.bytes()));

    const auto refused = [](const char* part, const auto& edit) {
        BpeTokenizer tokenizer;
        edit(tokenizer);
        CHECK_REFUSED(part, load(tokenizer.bytes()));
    };
    refused("every token once; got 'the' again as token 99", [](auto& t) { t.tokens.back() = "the"; });
    refused("without NUL", [](auto& t) { t.tokens.back() = std::string("a\0b", 3); });
    refused("1 to 2^31 - 1 tokens", [](auto& t) { t.tokens.clear(); });
    refused("libllama loads; got 'Index out of array bounds for toktypes (5 < 100)'",
            [](auto& t) { t.types.resize(5); });
    refused("libllama loads; got 'unknown pre-tokenizer type: 'abc''", [](auto& t) { t.pre = "abc"; });
    refused("expected a token id from 0 to 99; got 100", [](auto& t) { t.further_ends = {100}; });
    refused("expected a token id from 0 to 99; got -1", [](auto& t) { t.further_ends = {-1}; });
    refused("add_bos_token is set; got none", [](auto& t) {
        t.tokens.resize(8);  // too few for the default BOS
        t.types.resize(8);
        t.bos = 8;
    });
}

std::vector<float> wavy_logits(int32_t n) {
    std::vector<float> logits(static_cast<size_t>(n));
    for (int32_t i = 0; i < n; ++i) logits[static_cast<size_t>(i)] = 3.0f * std::sin(1.7f * static_cast<float>(i));
    return logits;
}

int32_t largest(const std::vector<float>& logits) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

std::vector<int32_t> drawn(Sampler& sampler, const std::vector<float>& logits, int n) {
    std::vector<int32_t> out;
    for (int i = 0; i < n; ++i) out.push_back(sampler.sample(logits));
    return out;
}

void test_draws() {
    constexpr int32_t n = 50;
    const auto logits = wavy_logits(n);

    SamplerOptions greedy;
    greedy.temperature = 0;
    CHECK(Sampler(greedy, n, nullptr).sample(logits) == largest(logits));
    SamplerOptions top1;
    top1.top_k = 1;
    CHECK(Sampler(top1, n, nullptr).sample(logits) == largest(logits));

    SamplerOptions options;
    options.seed = 7;
    Sampler first(options, n, nullptr);
    Sampler second(options, n, nullptr);
    const auto draws = drawn(first, logits, 50);
    CHECK(draws == drawn(second, logits, 50));
    first.reset();
    CHECK(draws == drawn(first, logits, 50));
    options.seed = 8;
    Sampler other(options, n, nullptr);
    CHECK(draws != drawn(other, logits, 50));

    options.seed = SamplerOptions::random_seed;
    Sampler random(options, n, nullptr);
    CHECK(random.seed() != SamplerOptions::random_seed && random.seed() != Sampler(options, n, nullptr).seed());
    options.seed = random.seed();
    Sampler replay(options, n, nullptr);
    CHECK(drawn(random, logits, 50) == drawn(replay, logits, 50));
}

// With every filter off, draws follow softmax(logits / temperature): chi-squared below its 99.99 % point.
void test_distribution() {
    constexpr int32_t n = 8;
    constexpr int n_draws = 20000;
    constexpr double chi2_7_9999 = 29.9;
    const std::vector<float> logits = {0, 1, 2, -1, 0.5f, 1.5f, -2, 0.25f};
    SamplerOptions options;
    options.temperature = 0.7f;
    options.top_k = 0;
    options.top_p = 1;
    options.min_p = 0;
    options.seed = 3;
    Sampler sampler(options, n, nullptr);

    std::vector<double> expected;
    for (float l : logits) expected.push_back(std::exp(l / 0.7));
    const double sum = std::accumulate(expected.begin(), expected.end(), 0.0);
    std::vector<double> counts(n);
    for (int32_t token : drawn(sampler, logits, n_draws)) counts[static_cast<size_t>(token)] += 1;
    const auto chi2 = [&](double temperature_error) {
        double total = 0;
        for (size_t i = 0; i < n; ++i) {
            const double e = std::pow(expected[i], temperature_error) / sum * n_draws;
            total += (counts[i] - e) * (counts[i] - e) / e;
        }
        return total;
    };
    CHECK(chi2(1.0) < chi2_7_9999);
    CHECK(chi2(1.1) > chi2_7_9999);  // the test sees a temperature that is 10 % off
}

void test_filters() {
    constexpr float ban = -std::numeric_limits<float>::infinity();
    const std::vector<float> logits = {5, 4.9f, 4.8f, 0, 0, 0};
    SamplerOptions greedy;
    greedy.temperature = 0;

    SamplerOptions biased = greedy;
    biased.logit_bias = {{0, ban}, {2, 1.0f}};
    CHECK(Sampler(biased, 6, nullptr).sample(logits) == 2);

    SamplerOptions penalised = greedy;
    penalised.repeat_penalty = 1.5f;
    penalised.penalty_last_n = 2;
    Sampler sampler(penalised, 6, nullptr);
    CHECK(sampler.sample(logits) == 0);
    sampler.accept(0);
    CHECK(sampler.sample(logits) == 1);
    sampler.accept(1);
    CHECK(sampler.sample(logits) == 2);
    sampler.accept(2);
    CHECK(sampler.sample(logits) == 0);  // out of the last two
    sampler.reset();
    CHECK(sampler.sample(logits) == 0);

    for (int mode : {1, 2}) {
        SamplerOptions mirostat;
        mirostat.mirostat_mode = mode;
        mirostat.seed = 5;
        Sampler a(mirostat, 6, nullptr);
        Sampler b(mirostat, 6, nullptr);
        CHECK(drawn(a, logits, 20) == drawn(b, logits, 20));
    }
    SamplerOptions all_banned = greedy;
    for (int32_t token = 0; token < 6; ++token) all_banned.logit_bias[token] = ban;
    CHECK_REFUSED("at least one possible token", Sampler(all_banned, 6, nullptr).sample(logits));
}

// Wants the tokens of a list, one after another, and then the end.
class InOrder : public lkv::TokenMatcher {
public:
    explicit InOrder(std::vector<int32_t> wanted) : wanted_(std::move(wanted)) {}
    bool allows(int32_t token) override { return at_ < wanted_.size() && token == wanted_[at_]; }
    void restrict(std::vector<llama_token_data>& candidates) override {
        std::erase_if(candidates, [this](const llama_token_data& candidate) { return !allows(candidate.id); });
    }
    void accept(int32_t) override { at_++; }
    void reset() override { at_ = 0; }
    std::unique_ptr<lkv::TokenMatcher> clone() const override { return std::make_unique<InOrder>(*this); }

private:
    std::vector<int32_t> wanted_;
    size_t at_ = 0;
};

void test_matcher() {
    const auto logits = wavy_logits(40);
    const std::vector<int32_t> wanted = {7, 31, 7, 2};
    const auto sampler_with = [&](const auto& edit) {
        SamplerOptions options;
        options.seed = 3;
        edit(options);
        return Sampler(options, 40, nullptr, std::make_unique<InOrder>(wanted));
    };
    const auto written = [&](Sampler& sampler, size_t n) {
        std::vector<int32_t> tokens;
        for (size_t i = 0; i < n; ++i) {
            tokens.push_back(sampler.sample(logits));
            sampler.accept(tokens.back());
        }
        return tokens;
    };
    const std::vector<std::function<void(SamplerOptions&)>> edits = {[](auto&) {}, [](auto& o) { o.temperature = 0; },
                                                                     [](auto& o) { o.top_k = 0; },
                                                                     [](auto& o) { o.mirostat_mode = 2; }};
    for (const auto& edit : edits) {
        Sampler sampler = sampler_with(edit);
        CHECK(written(sampler, 4) == wanted);
        CHECK_REFUSED("at least one possible token", sampler.sample(logits));
        sampler.reset();
        CHECK(written(sampler, 1).front() == 7);
        Sampler copy = sampler.clone();
        CHECK(written(copy, 1).front() == 31);
        CHECK(written(sampler, 1).front() == 31);
        sampler.accept(5, /*in_grammar=*/false);
        CHECK_REFUSED("a token that the grammar allows", sampler.accept(5));
    }
}

void test_refused_options() {
    const auto refused = [](const char* part, const auto& edit) {
        SamplerOptions options;
        edit(options);
        CHECK_REFUSED(part, Sampler(options, 10, nullptr));
    };
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    refused("expected temperature", [](auto& o) { o.temperature = nan; });
    refused("expected min_p from 0 to 1; got 2", [](auto& o) { o.min_p = 2; });
    refused("expected top_p", [](auto& o) { o.top_p = -0.1f; });
    refused("expected repeat_penalty", [](auto& o) { o.repeat_penalty = 0; });
    refused("expected penalty_last_n", [](auto& o) { o.penalty_last_n = -1; });
    refused("expected mirostat_mode 0, 1 or 2; got 3", [](auto& o) { o.mirostat_mode = 3; });
    refused("token ids from 0 to 9 in logit_bias; got 10", [](auto& o) { o.logit_bias[10] = 1; });
    refused("expected a bias", [](auto& o) { o.logit_bias[1] = std::numeric_limits<float>::infinity(); });

    Sampler sampler({}, 10, nullptr);
    CHECK_REFUSED("[sampler] expected 10 logits; got 9", sampler.sample(std::vector<float>(9)));
    CHECK_REFUSED("got nan for token 3", {
        std::vector<float> logits(10);
        logits[3] = nan;
        sampler.sample(logits);
    });
    CHECK_REFUSED("expected a token id from 0 to 9; got 10", sampler.accept(10));
}

}  // namespace

int main() {
    test_bpe();
    test_sentencepiece();
    test_refused_vocabularies();
    test_draws();
    test_distribution();
    test_filters();
    test_matcher();
    test_refused_options();
    return report("test_vocab");
}
