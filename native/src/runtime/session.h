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
#include "decoder/rope.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "graph/graph.h"
#include "model/model.h"
#include "runtime/equal_runs.h"
#include "runtime/pipeline_stage.h"
#include "runtime/plan/session_plan.h"
#include "runtime/row_encoder.h"

namespace lkv {

class StagedKeys;

class Session {
public:
    // Errors: those of require_runnable() and resolve(), before anything is allocated; Error when there is no memory.
    Session(const std::shared_ptr<const Model>& model, const SessionOptions& options);

    const Model& model() const { return *model_; }
    const KvCache& cache() const { return cache_; }
    KvCache& cache() { return cache_; }  // to change its sequences; but shift() moves positions
    const KvCacheOptions& options() const { return cache_.options(); }
    std::string implementation() const;
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
    // n_ahead: the last n_ahead tokens, of one sequence, are guesses that seq_rm may remove again: no token leaves the recent window
    // because of them. result: rows are logits, or hidden states [n, n_embd].
    // stop: asked on this thread while the CPU computes a ubatch, often; where it says true the call ends with an Error, and of this
    // ubatch nothing stays. Not asked under eviction, whose attention has counted by then. It must not throw.
    using ResultRoom = std::function<float*(size_t n)>;
    void decode(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                std::span<const uint8_t> output, const ResultRoom& room,
                const std::function<void()>& between_ubatches = {}, int n_ahead = 0, Result result = Result::logits,
                const std::function<bool()>& stop = {});

    const Placement& placement() const { return cache_.placement(); }
    Placement& placement() { return cache_.placement(); }
    // Errors: Error for rows that carry their position; those of KvCache::shift.
    void shift(int seq, const Positions& positions, int32_t delta);

    size_t compute_bytes() const;
    size_t prefill_bytes() const { return prefill_bytes_; }  // the most that a lazy prefill has taken

    std::vector<uint8_t> state() const;
    // Both say what was lost (StateReader).
    std::string set_state(std::span<const uint8_t> state, Accept accept = Accept::same);
    std::vector<uint8_t> seq_state(int seq) const;
    std::vector<std::vector<uint8_t>> seq_state_parts(int seq, std::span<const int32_t> cuts) const;
    std::string set_seq_state(int seq, std::span<const std::span<const uint8_t>> parts, Accept accept = Accept::same);
    std::string set_seq_state(int seq, std::span<const uint8_t> whole, Accept accept = Accept::same) {
        return set_seq_state(seq, std::span(&whole, 1), accept);
    }

private:
    Session(std::shared_ptr<const Model> model, const SessionPlan& plan);

    struct ThreadpoolDeleter {
        void operator()(ggml_threadpool* pool) const { ggml_threadpool_free(pool); }
    };

    void check_batch(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq) const;
    void run_ubatch(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                    std::span<const int32_t> out_ids, const EqualRuns& runs, int n_ahead, Result result, float* rows);
    void claim_states(std::span<const int32_t> seq, const EqualRuns& runs, int n_ahead);
    void commit_states(std::span<const int32_t> pos, const EqualRuns& runs);
    void compute_ubatch(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> out_ids,
                        const GraphShape& shape, float* rows);
    // What decode() was called with.
    struct LazyPrompt {
        std::span<const int32_t> tokens;
        std::span<const int32_t> pos;
        std::span<const int32_t> seq;
        std::span<const uint8_t> output;
        const ResultRoom& room;
        const std::function<void()>& between_ubatches;
        Result result;
    };
    void prefill_lazily(const LazyPrompt& prompt);
    // hidden: [n_tokens, n_embd], states before the layer and then after it
    void prefill_layer(int il, const LazyPrompt& prompt, std::span<const SlotRef> targets, ExactRows& exact,
                       const StagedKeys& staged, std::span<float> hidden);
    bool starts_sequences(std::span<const int32_t> seq) const;
    EqualRuns next_ubatch(std::span<const int32_t> seq, std::span<const uint8_t> output) const;
    void keep_snapshots(const EqualRuns& ubatch);
    static std::vector<int32_t> wanted(std::span<const uint8_t> output);  // indices of the tokens that are wanted
    void attach_stages(bool kv_rotate);
    void attach_states();
    GraphShape graph_shape(size_t n_tokens, size_t n_outputs, const KvCache& rows) const;  // of all layers, on the CPU
    void prepare_graph(PipelineStage& stage, const GraphShape& shape, const ExactRows* exact = nullptr);
    void prepare_graphs(const GraphShape& all);
    // Runs the prepared graph. `rows`, `batch`: what its attention reads, and the ubatch's slots there.
    void compute(PipelineStage& stage, std::span<const int32_t> tokens, std::span<const int32_t> pos,
                 std::span<const int32_t> out_ids, const KvCache& rows, const BatchSlots& batch);
    void fill_reference_inputs(const Graph& graph, const KvCache& rows, const BatchSlots& batch);
    unsigned rotated() const;
    uint64_t fingerprint(unsigned rotated) const;
    std::vector<uint8_t> signed_state(std::vector<uint8_t> rows) const;
    std::pair<std::span<const uint8_t>, RowRotation> unsigned_state(std::span<const uint8_t> state) const;

    std::shared_ptr<const Model> model_;
    bool fused_;
    Prefill prefill_;
    int n_threads_;
    int n_threads_batch_;
    std::vector<PipelineStage> stages_;  // one for each of the model's runs. Before the cache, whose rows they hold
    KvCache cache_;
    Ropes ropes_;
    std::unique_ptr<ggml_threadpool, ThreadpoolDeleter> threadpool_;
    ggml_backend_ptr backend_;
    std::optional<GgmlRowEncoder> encoder_;  // on the CPU
    BatchSlots batch_;
    SequenceState::Step step_;   // of the ubatch that runs
    std::vector<float> hidden_;  // [n_tokens, n_embd] of the batch, on their way to a device
    size_t prefill_bytes_ = 0;
};

}  // namespace lkv
