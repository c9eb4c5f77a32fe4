#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>

#include "check.h"
#include "cuda/session/calls.h"
#include "cuda/session/families.h"

namespace lkv::test {

namespace {

// A state does not know where its layers were: what a session with both devices saved goes on in others as in its own.
void move_states(const File& file, const lkv::SessionOptions& options, const std::string& name) {
    std::vector<lkv::GpuOptions> places = {on_gpu(1), on_gpu(99), on_gpu(0)};
    if (n_gpus() > 1) places.push_back({99, {1, 1}});
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

// A few shapes of every path, with and without encoded latents. Lazy prompts attend to whole K and V, or to latents that are uncut.
bool in_token_blocks(size_t shape, const std::string& prefill) {
    const std::set<size_t> of = prefill == "lazy" ? std::set<size_t>{4, 7, 9, 11} : std::set<size_t>{2, 7};
    return of.contains(shape);
}

// A file of a shape, and what its sessions are opened with most often beside its own windows.
struct Subject {
    const Shape& shape;
    const File& file;
    std::string paths;
    Combination plain;

    Subject(const Shape& of, const File& its) : shape(of), file(its), paths(std::string(of.k_path) + "/" + of.v_path) {
        plain.options.n_ctx = 256;
        plain.options.n_seq_max = 2;
        plain.options.n_threads = 1;
        plain.options.sink = plain.options.recent = 0;
        plain.options.n_guesses = shape.hybrid ? 3 : 0;
        plain.name = paths + ", no windows";
    }
    bool is_first_encoded(const char* path) const { return &shape == first_encoded(path); }
    // The combination has to be a legal one.
    void compare_legal(const Combination& c) const { CHECK_MSG(compare(file, c), c.name + ": not a legal one"); }
};

// Ubatches longer than what the recent region takes at once; of the same format everywhere, as the GPU attends to exact rows where the CPU
// does to those that it has settled.
void long_ubatches(const Subject& of) {
    Combination prompt = of.plain;
    prompt.name = of.paths + ", long ubatches";
    prompt.prompt = 150;
    prompt.options.n_ctx = 1024;
    prompt.options.sink = prompt.options.recent = -1;
    prompt.options.kv = "f16";
    if (of.shape.encoded != Shape::random) compare(of.file, prompt);
    if (number_of(of.shape) == 0) {  // a window of more tokens than enter the recent region without a longer one
        prompt.name += ", 160 recent tokens";
        prompt.prompt = 400;
        prompt.options.n_ctx = 2048;
        prompt.options.recent = 160;
        of.compare_legal(prompt);
    }
}

void many_sequences(const Subject& of) {
    Combination many = of.plain;
    many.options.sink = 2;
    many.options.recent = 16;
    if (of.is_first_encoded("rebuild") || of.is_first_encoded("rotated")) {
        many.name = of.paths + ", twelve sequences";
        many.options.n_ctx = 1024;
        many.options.n_seq_max = 12;
        of.compare_legal(many);
    }
    // so many tokens of its heads expand latents, unless they read their own slots
    if (number_of(of.shape) == shapes.size() - 1) {
        many.name = "wide latents, 25 sequences";
        many.options.n_ctx = 8192;
        many.options.n_seq_max = 25;
        of.compare_legal(many);
    }
}

void paths_alone(const Subject& of) {
    if (of.is_first_encoded("rotated")) {
        Combination narrow = of.plain;  // latents narrower than two heads, which 512 tokens expand
        narrow.name = "rotated/latent, a long ubatch";
        narrow.prompt = 520;
        narrow.options.n_ctx = 2048;
        narrow.options.n_ubatch = 1024;
        of.compare_legal(narrow);
    }
    if (of.paths == "full/full") {
        Combination rotated = of.plain;
        rotated.name = "full/full, rotated rows in q4_0";
        rotated.options.kv = "q4_0";
        of.compare_legal(rotated);
    }
}

void both_devices(const Subject& of) {
    if (!splits(of.shape)) return;
    Combination both = of.plain;
    both.name = of.paths + ", the first layer on the CPU";
    both.options.sink = both.options.recent = -1;
    both.options.kv = "q4";
    compare(of.file, both, 1);
    both.options.n_ubatch = 16;  // of which the ring's slots depend
    if (of.shape.unlike || of.shape.hybrid || of.shape.turned > 0) move_states(of.file, both.options, both.name);
}

void rings(const Subject& of) {
    if (!of.shape.unlike) return;
    const int slots = 64;  // two windows and a ubatch, whole tiles
    Combination ring = of.plain;
    ring.name = of.paths + ", a ring that is filled several times";
    ring.prompt = 100;
    ring.options.n_ctx = 512;
    ring.options.n_ubatch = 16;
    CHECK(ring_slots(of.file, ring.options) == slots);
    compare(of.file, ring);
    ring.options.sink = ring.options.recent = -1;
    ring.options.recent = 8;
    ring.name += " beside exact windows";
    CHECK(ring_slots(of.file, ring.options) == slots);
    compare(of.file, ring);
    ring.options.kv = "";
    ring.options.kv_k = "c4";
    ring.options.kv_v = "q4";
    ring.name += ", K of other layers in blocks of tokens";
    CHECK(ring_slots(of.file, ring.options) == slots);
    CHECK_MSG(compare(of.file, ring) || of.shape.k_path != std::string("full"), ring.name + ": not a legal one");
}

void token_blocks(const Subject& of) {
    for (const char* prefill : {"eager", "lazy"}) {
        if (!in_token_blocks(number_of(of.shape), prefill)) continue;
        Combination blocks = of.plain;
        blocks.name = of.paths + ", K in blocks of tokens, " + prefill;
        blocks.prompt = prefill == std::string("lazy") ? 84 : 48;  // a block of every sequence, and a few tokens more
        blocks.options.prefill = prefill;
        blocks.options.recent = 8;
        blocks.options.n_ubatch = 20;  // an eager prompt sees tokens that are compressed
        blocks.options.kv_k = "c3";
        blocks.options.kv_v = "q3";
        of.compare_legal(blocks);
    }
}

}  // namespace

int sessions(Arguments arguments) {
    const auto argument = [&](size_t i) { return i < arguments.size() ? arguments[i] : nullptr; };
    const int rounds = argument(0) != nullptr ? std::atoi(argument(0)) : 1;
    std::mt19937 random(argument(1) != nullptr ? static_cast<unsigned>(std::atoi(argument(1))) : 1);
    if (argument(2) != nullptr) share_of_formats = std::atof(argument(2));
    const size_t first = argument(3) != nullptr ? std::strtoul(argument(3), nullptr, 10) : 0;
    const size_t count = argument(4) != nullptr ? std::strtoul(argument(4), nullptr, 10) : shapes.size();
    for (const Shape& shape : shapes) {
        // drawn for those that are left out, too: what the others are tried with stays as it is
        const unsigned seed = random();
        std::vector<Combination> drawn;
        for (int i = 0; i < rounds; i++) drawn.push_back(combination(random, shape));
        const size_t number = number_of(shape);
        if (number < first || number - first >= count) continue;
        const File file(shape, seed);
        const Subject of(shape, file);
        compare(file, of.plain);
        for (const auto& family : {long_ubatches, many_sequences, paths_alone, both_devices, rings, token_blocks}) {
            family(of);
        }
        for (const Combination& c : drawn) compare(file, c);
    }
    return report("gpu_session");
}

}  // namespace lkv::test
