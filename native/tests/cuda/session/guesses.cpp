#include <string>

#include "check.h"
#include "cuda/session/calls.h"
#include "cuda/session/families.h"

namespace lkv::test {

namespace {

constexpr int n_guesses = 3;

lkv::SessionOptions options(bool mtp) {
    lkv::SessionOptions options;
    options.n_ctx = 512;
    options.n_seq_max = 3;
    options.n_threads = 1;
    options.n_guesses = n_guesses;
    options.mtp = mtp;
    return options;
}

std::vector<int32_t> guess(Talk& talk, int seq = 0, float sure = 0.0F) {
    return talk.session.guess(seq, 7, n_guesses, sure);
}

// Guesses are the CPU's, and nothing else changes because of them.
void like_the_cpu(const std::string& name, const File& file) {
    Talk cpu(file, options(true), 0);
    Talk gpu(file, options(true));
    Talk split(file, options(true), 1);  // on the CPU but for the last layer, which the one that guesses is with
    Talk plain(file, options(false));
    const auto same = [&](int n, const std::vector<int32_t>& of, const std::string& what, int n_guessed = 0) {
        const std::vector<float> want = cpu.run(n, of, n_guessed);
        const std::vector<float> got = gpu.run(n, of, n_guessed);
        CHECK_MSG(relative_error(got, want) < 2e-2, name + ", " + what + ": other logits than the CPU's");
        split.run(n, of, n_guessed);
        CHECK_MSG(relative_error(got, plain.run(n, of, n_guessed)) < 1e-4,
                  name + ", " + what + ": other logits than without");
        for (const int32_t s : of) {
            CHECK_MSG(guess(gpu, s) == guess(cpu, s), name + ", " + what + ": other guesses");
            CHECK_MSG(guess(split, s) == guess(cpu, s), name + ", " + what + ": other guesses, on both devices");
            CHECK(guess(gpu, s).size() == n_guesses);
            CHECK(guess(gpu, s, 1.0F).empty());
        }
    };
    same(40, {0}, "a prompt");
    same(1, {0}, "a token");
    same(4, {0}, "tokens together", n_guesses);
    for (Talk* const each : {&cpu, &gpu, &split, &plain}) {
        CHECK(each->session.remove(0, {each->length[0] - 2}));
        each->length[0] -= 2;
    }
    CHECK_MSG(guess(gpu) == guess(cpu), name + ": other guesses behind a removed tail");
    same(3, {0}, "tokens behind a removed tail");
    same(60, {1, 2}, "two prompts");
    same(3, {0, 1, 2}, "three sequences");
}

// Without the states of the latest tokens nothing is guessed, until there are some.
void copies_and_states(const std::string& name, const File& file) {
    Talk talk(file, options(true));
    talk.run(50);
    const std::vector<int32_t> want = guess(talk);
    talk.session.copy(0, 1, {});
    CHECK_MSG(guess(talk, 1) == want, name + ": other guesses of a copy");
    const std::vector<uint8_t> state = talk.session.seq_state(0);
    talk.session.set_seq_state(2, state);
    CHECK(guess(talk, 2).empty());
    talk.length[2] = 50;
    talk.run(1, {2});
    CHECK(guess(talk, 2).size() == n_guesses);
    CHECK(guess(talk) == want);
    talk.session.clear();
    CHECK(guess(talk).empty());
}

}  // namespace

int guesses(Arguments) {
    for (const size_t number :
         {size_t{0}, size_t{2}, size_t{7}, size_t{20}, number_of(first_hybrid()), number_of(first_mla())}) {
        Shape shape = shapes[number];
        shape.guesses = true;
        const File file(shape, 3);
        const std::string name = std::string(shape.k_path) + " " + std::to_string(number);
        like_the_cpu(name, file);
        copies_and_states(name, file);
    }
    return report("gpu_guesses");
}

}  // namespace lkv::test
