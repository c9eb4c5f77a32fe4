#include "cuda/session/calls.h"

#include <cmath>

#include <algorithm>
#include <numeric>

#include "check.h"
#include "devices/gpus.h"

namespace lkv::test {

int n_gpus() {
    std::string why;
    return lkv::count_gpus(why);
}

int ring_slots(const File& file, const lkv::SessionOptions& options) {
    const lkv::Model model(file.path(), {});
    const lkv::KvCache cache(model.hparams(), model.cache_spec(), lkv::resolve(model, options).cache, false);
    return cache.placement().ring() != nullptr ? cache.placement().ring()->cells().capacity() : 0;
}

lkv::GpuOptions on_gpu(int n_gpu_layers, int gpu) {
    return {n_gpu_layers, {}, gpu, n_gpu_layers == 0 ? lkv::SplitMode::layer : lkv::SplitMode::none};
}

std::shared_ptr<const lkv::Model> open(const File& file, const lkv::GpuOptions& gpu) {
    return std::make_shared<lkv::Model>(file.path(), lkv::ModelOptions{.gpu = gpu});
}

Tokens next_tokens(int n, const std::vector<int32_t>& of, std::vector<int32_t>& length) {
    Tokens next;
    for (int i = 0; i < n; i++) {
        const int32_t s = of[static_cast<size_t>(i) % of.size()];
        const int32_t at = length[static_cast<size_t>(s)]++;
        next.tokens.push_back((at * 37 + s * 11 + at * at) % n_vocab);
        next.pos.push_back(at);
        next.seq.push_back(s);
    }
    return next;
}

std::vector<float> Talk::run(int n, const std::vector<int32_t>& of, int n_guessed) {
    const auto [tokens, pos, seq] = next_tokens(n, of, length);
    std::vector<uint8_t> output;
    std::vector<uint8_t> guessed;
    for (size_t left = tokens.size(); left > 0; left--) {
        output.push_back(left == 1);
        guessed.push_back(left <= static_cast<size_t>(n_guessed));
    }
    std::vector<float> logits(n_vocab, NAN);
    session.decode(tokens, pos, seq, output, [&](size_t) { return logits.data(); }, {}, guessed);
    return logits;
}

std::vector<float> decode(const File& file, const lkv::SessionOptions& options, const lkv::GpuOptions& gpu, int prompt,
                          int steps) {
    const auto model = open(file, gpu);
    lkv::Session session(model, options);
    CHECK(session.implementation().starts_with("fused cuda") == (gpu.n_gpu_layers > 0));
    CHECK(model->n_host_layers() == std::max(0, model->hparams().n_layer - gpu.n_gpu_layers));
    std::vector<float> logits;
    std::vector<int32_t> length(static_cast<size_t>(options.n_seq_max), 0);
    const auto run = [&](int n, const std::vector<int32_t>& of, bool all = false) {
        const auto [tokens, pos, seq] = next_tokens(n, of, length);
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
        std::vector<uint8_t> guessed(tokens.size(), 0);
        std::fill(guessed.end() - 3, guessed.end(), 1);
        session.decode(tokens, pos, seq, output, [&](size_t) { return all.data(); }, {}, guessed);
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

namespace {

// The calls, of those whose last tokens' logits `got` and `want` are, that differ by more than `tolerance`.
std::string unlike_calls(const std::vector<float>& got, const std::vector<float>& want, double tolerance) {
    std::string calls;
    for (size_t at = 0; at < want.size(); at += n_vocab) {
        const auto part = [at](const std::vector<float>& all) {
            return std::vector<float>(all.begin() + static_cast<ptrdiff_t>(at),
                                      all.begin() + static_cast<ptrdiff_t>(at + n_vocab));
        };
        const double error = relative_error(part(got), part(want));
        if (error > tolerance) calls += std::string(" ") + std::to_string(at / n_vocab) + ": " + std::to_string(error);
    }
    return calls;
}

}  // namespace

bool compare(const File& file, const Combination& c, int n_gpu_layers) {
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

}  // namespace lkv::test
