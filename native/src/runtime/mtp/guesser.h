// What a model's own layers guess (model/mtp.h) of the sequences that a session decodes. They have a cache of their own, which follows:
// every token enters with the hidden state before it, once the model has computed that. A token whose state before is not known here,
// as after a saved state was restored, has no row; guesses are less often right then, and nothing else changes.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "runtime/batch_runner.h"
#include "runtime/plan/session_options.h"

namespace lkv {

class Session;

class Guesser {
public:
    // options: of the session that is followed. Errors: those of mtp_hparams() and of a Session
    Guesser(const std::shared_ptr<const Model>& whole, const SessionOptions& options);
    ~Guesser();

    // Tokens that were run, with the hidden states after them.
    void follow(const Ubatch& ubatch);
    // The likeliest tokens behind `token`, which comes after position `last`, one after the other, `most` at most: the first that is less
    // likely than `sure` ends them. None where the state at `last` is not known.
    std::vector<int32_t> guess(int seq, int32_t last, int32_t token, int most, float sure);

    // As the session's cache. A sequence that cannot be followed any more is forgotten.
    void remove(int seq, const Positions& positions);
    void copy(int src, int dst, const Positions& positions);
    void keep(int seq);
    void forget(int seq);  // seq < 0: all of them

    double cost() const;  // of one guess, in tokens of the model
    size_t cache_bytes() const;

private:
    static constexpr int n_kept = most_guesses + 1;  // states of a sequence: guesses may be taken back

    struct Sequence {
        std::array<int32_t, n_kept> pos;  // of the states, or -1
        std::vector<float> states;        // [n_kept, n_embd], or none yet

        Sequence() { pos.fill(-1); }
    };

    const float* state_at(int seq, int32_t pos) const;  // or null
    void note(int seq, int32_t pos, const float* state);
    void forget_states(int seq, const Positions& positions);
    void end_at(int seq, int32_t pos);

    std::unique_ptr<Session> session_;
    size_t n_embd_;
    std::vector<Sequence> sequences_;
    // of follow(): what is run, reused
    std::vector<int32_t> tokens_, pos_, seq_;
    std::vector<float> before_;
};

}  // namespace lkv
