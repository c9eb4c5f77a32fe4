// One KV cache and its compute graph on a model: tokens in, logits out.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/kv_cache.h"
#include "cache/state/saved_state.h"
#include "model/model.h"
#include "runtime/batch_runner.h"
#include "runtime/lazy_prefill.h"
#include "runtime/plan/session_plan.h"
#include "runtime/states.h"

namespace lkv {

class Guesser;

// Hidden states of a batch, [n_tokens, n_embd], beside its results.
struct BatchStates {
    const float* before = nullptr;  // of the tokens before, for a model that reads them
    float* after = nullptr;         // after the last norm; null: not wanted
};

class Session {
public:
    // Errors: those of require_runnable() and resolve(), before anything is allocated; Error when there is no memory.
    Session(const std::shared_ptr<const Model>& model, const SessionOptions& options);
    ~Session();
    Session(const Session&) = delete;  // its parts know each other
    Session& operator=(const Session&) = delete;

    const Model& model() const { return *model_; }
    const KvCache& cache() const { return cache_; }
    KvCache& cache() { return cache_; }  // to change its sequences; but those below follow them in guesses too
    const KvCacheOptions& options() const { return cache_.options(); }
    std::string implementation() const { return runner_.implementation(); }
    Prefill prefill() const { return prefill_; }
    bool can_rotate() const;  // whether there are full rows that kv_rotate can rotate

    // Runs a batch in ubatches; logits of the tokens with output[i] != 0 go to `logits` [n_outputs, n_vocab] in batch order.
    // between_ubatches, when given, runs after each ubatch; it may throw to stop. What ran stays in the cache.
    // With lazy prefill, a call in which every sequence starts is prefilled lazily, and stays in the cache whole or not at
    // all; in other calls tokens see the compressed past.
    // Errors: Error for a token, position or sequence out of range, a non-increasing position, or too few free cells.
    void decode(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                std::span<const uint8_t> output, float* logits, const std::function<void()>& between_ubatches = {});
    // The same for callers without room for all logits: room(n) is asked for [n, n_vocab] floats before each ubatch.
    // guessed: flags, none given: none. A sequence's last tokens may be guesses, which seq_rm may remove again: no token leaves the recent
    // window because of them. result: rows are logits, or hidden states [n, n_embd].
    // stop: asked on this thread while the CPU computes a ubatch, often; where it says true the call ends with an Error, and of this
    // ubatch nothing stays. Not asked under eviction, whose attention has counted by then. It must not throw.
    void decode(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                std::span<const uint8_t> output, const ResultRoom& room,
                const std::function<void()>& between_ubatches = {}, std::span<const uint8_t> guessed = {},
                Result result = Result::logits, const std::function<bool()>& stop = {}, const BatchStates& states = {});

    const Placement& placement() const { return cache_.placement(); }
    Placement& placement() { return cache_.placement(); }
    // The verbs of KvCache. Errors of shift(): Error for rows that carry their position too.
    [[nodiscard]] bool remove(int seq, const Positions& positions = {});
    void copy(int src, int dst, const Positions& positions);
    void keep(int seq);
    void clear();
    void shift(int seq, const Positions& positions, int32_t delta);

    // What the model's own layers guess (SessionOptions::mtp), or null: with it, what they take is that of the whole session.
    const Guesser* guesser() const { return guesser_.get(); }
    // Tokens that may follow `token`, which comes next in the sequence (Guesser::guess).
    std::vector<int32_t> guess(int seq, int32_t token, int most, float sure);

    // Compressed rows that decoded tokens have read by choice, of all layers, so far (kv_read).
    uint64_t rows_read() const { return runner_.rows_read(); }

    size_t compute_bytes() const { return runner_.compute_bytes(); }
    size_t prefill_bytes() const { return lazy_prefill_.bytes(); }  // the most that a lazy prefill has taken

    std::vector<uint8_t> state() const { return states_.whole(); }
    // Both say what was lost (StateReader).
    std::string set_state(std::span<const uint8_t> state, Accept accept = Accept::same);
    std::vector<uint8_t> seq_state(int seq) const { return states_.sequence(seq); }
    std::vector<std::vector<uint8_t>> seq_state_parts(int seq, std::span<const int32_t> cuts) const {
        return states_.parts(seq, cuts);
    }
    std::string set_seq_state(int seq, std::span<const std::span<const uint8_t>> parts, Accept accept = Accept::same);
    std::string set_seq_state(int seq, std::span<const uint8_t> whole, Accept accept = Accept::same) {
        return set_seq_state(seq, std::span(&whole, 1), accept);
    }

private:
    Session(std::shared_ptr<const Model> model, const SessionPlan& plan);

    void check_batch(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq) const;
    void check_guesses(std::span<const int32_t> seq, std::span<const uint8_t> guessed) const;
    EqualRuns next_ubatch(std::span<const int32_t> seq, std::span<const uint8_t> output) const;

    std::shared_ptr<const Model> model_;
    Prefill prefill_;
    BatchRunner runner_;  // before the cache, whose rows its devices hold
    KvCache cache_;
    LazyPrefill lazy_prefill_;
    States states_;
    std::unique_ptr<Guesser> guesser_;
    std::vector<float> followed_;  // hidden states of a ubatch, for it
};

}  // namespace lkv
