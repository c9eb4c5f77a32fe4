#include <exception>
#include <string>
#include <utility>

#include "check.h"
#include "cuda/session/calls.h"
#include "cuda/session/families.h"

// The emulated GPU has it (emulated_gpu/device.h), a real one does not.
extern "C" [[gnu::weak]] void emulated_fail_allocation(int nth);
extern "C" [[gnu::weak]] size_t emulated_copied_bytes();

namespace lkv::test {

namespace {

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

}  // namespace

int memory(Arguments) {
    if (emulated_fail_allocation == nullptr) {
        std::printf("gpu_memory: skipped: a GPU cannot be told to find no memory; the emulated one can\n");
        return 77;
    }
    for (const size_t shape : {2, 4, 7, 27}) {
        for (const int n_seq : {2, 20}) states_copy_their_rows(shapes[shape], n_seq);
    }
    for (const size_t shape : {2, 4, 7, 27}) memory_runs_out(shapes[shape]);
    return report("gpu_memory");
}

}  // namespace lkv::test
