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
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "model/graph.h"
#include "model/model.h"
#include "model/rope.h"
#include "runtime/part.h"
#include "runtime/row_encoder.h"

namespace lkv {

class StagedKeys;

struct SessionOptions {
    int n_ctx = 0;  // 0: the model's training context
    int n_ubatch = 512;
    int n_seq_max = 1;
    int n_threads = 0;        // 0: every usable core
    int n_threads_batch = 0;  // 0: n_threads
    std::string kv;           // row format of K and V; empty: the file's plan, else f16
    std::string kv_k;
    std::string kv_v;
    std::vector<std::string> k_plan;  // a row format per segment in place of the file's plan; empty: the file's
    std::vector<std::string> v_plan;
    std::string kv_sink;  // row format of a region; empty: the file's, else f16
    std::string kv_recent;
    bool kv_rotate = true;  // Hadamard for quantized `full` rows
    int sink = -1;          // -1: the file's default
    int recent = -1;        // a count or a ratio replaces the file's window, whichever it is
    double recent_ratio = -1;
    std::string evict;        // a policy of cache/evict/policies.h; empty or none: every token stays
    std::string keep_tokens;  // beside it: tokens that a layer keeps of a sequence, as a number or "50%" of its context
    std::string prefill;      // eager, lazy; empty: the file's default
    bool fused = true;        // false: the stock-ggml expression
    bool require_fused = false;  // on the device that the model was asked to run on
};

KvCacheOptions cache_options(const Model& model, const SessionOptions& options);

// Errors: Error for another word, or lazy where exact K and V are not in the file; or by these options under eviction, or where layers
// are on several devices. By the file it is eager then (prefills_lazily).
Prefill prefill_option(const Model& model, const SessionOptions& options);

// Of a full ubatch's graphs with one output, of every run, before any of it is allocated. A GPU's kernels take scratch beside them.
std::vector<size_t> forecast_compute_bytes(const Model& model, const SessionOptions& options);

// What a lazily prefilled prompt of n_ctx tokens takes beside that; 0 when prefill is eager.
size_t forecast_prefill_bytes(const Model& model, const SessionOptions& options);

class Session {
public:
    Session(std::shared_ptr<const Model> model, const SessionOptions& options);

    const Model& model() const { return *model_; }
    const KvCache& cache() const { return cache_; }
    const KvCacheOptions& options() const { return cache_.options(); }
    std::string implementation() const;
    Prefill prefill() const { return prefill_; }
    bool can_rotate() const;  // whether there are full rows that kv_rotate is about

    // Runs a batch in ubatches; logits of the tokens with output[i] != 0 go to `logits` [n_outputs, n_vocab] in batch order.
    // between_ubatches, when given, runs after each ubatch; it may throw to stop. What ran stays in the cache.
    // With lazy prefill, a call in which every sequence starts is prefilled lazily, and stays in the cache whole or not at
    // all; in other calls tokens see the compressed past.
    // Errors: Error for a token, position or sequence out of range, a non-increasing position, or too few free cells.
    void decode(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                std::span<const uint8_t> output, float* logits, const std::function<void()>& between_ubatches = {});
    // The same without room for all logits: where those of a ubatch go is asked before it is computed. room(n): [n, n_vocab]
    // n_ahead: so many of the last tokens, of one sequence, are guesses, which seq_rm may take back: no token leaves the
    // recent window on their account.
    using LogitsRoom = std::function<float*(size_t n)>;
    void decode(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                std::span<const uint8_t> output, const LogitsRoom& room,
                const std::function<void()>& between_ubatches = {}, int n_ahead = 0);

    // Its tokens, and the verbs of their sequences; but positions are moved by shift().
    const Placement& placement() const { return cache_.placement(); }
    Placement& placement() { return cache_.placement(); }
    // Errors: Error for rows that carry their position; those of Placement::shift.
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
    struct ThreadpoolDeleter {
        void operator()(ggml_threadpool* pool) const { ggml_threadpool_free(pool); }
    };

    void check_batch(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq) const;
    void run_ubatch(std::span<const int32_t> tokens, std::span<const int32_t> pos, std::span<const int32_t> seq,
                    std::span<const int32_t> out_ids, float* logits);
    // What decode() was called with.
    struct LazyPrompt {
        std::span<const int32_t> tokens;
        std::span<const int32_t> pos;
        std::span<const int32_t> seq;
        std::span<const uint8_t> output;
        const LogitsRoom& room;
        const std::function<void()>& between_ubatches;
    };
    void prefill_lazily(const LazyPrompt& prompt);
    // hidden: [n_tokens, n_embd], states before the layer and then behind it
    void prefill_layer(int il, const LazyPrompt& prompt, std::span<const SlotRef> targets, ExactRows& exact,
                       const StagedKeys& staged, std::span<float> hidden);
    bool starts_sequences(std::span<const int32_t> seq) const;
    size_t next_ubatch(std::span<const int32_t> seq) const;
    static std::vector<int32_t> wanted(std::span<const uint8_t> output);  // indices of the tokens that want logits
    void attach_parts(bool kv_rotate);
    GraphShape graph_shape(size_t n_tokens, size_t n_outputs, const KvCache& rows) const;  // of all layers, on the CPU
    void prepare_graph(Part& part, const GraphShape& shape, const ExactRows* exact = nullptr);
    void prepare_graphs(const GraphShape& all);
    // Runs the prepared graph. `rows`, `batch`: what its attention reads, and the ubatch's slots there.
    void compute(Part& part, std::span<const int32_t> tokens, std::span<const int32_t> pos,
                 std::span<const int32_t> out_ids, const KvCache& rows, const BatchSlots& batch);
    void fill_reference_inputs(const Graph& graph, const KvCache& rows, const BatchSlots& batch);
    unsigned rotated() const;
    uint64_t fingerprint(unsigned rotated) const;
    std::vector<uint8_t> signed_state(std::vector<uint8_t> rows) const;
    std::pair<std::span<const uint8_t>, RowTurn> unsigned_state(std::span<const uint8_t> state) const;

    std::shared_ptr<const Model> model_;
    bool fused_;
    Prefill prefill_;
    int n_threads_;
    int n_threads_batch_;
    std::vector<Part> parts_;  // one for each of the model's runs. Before the cache, whose rows they hold
    KvCache cache_;
    Ropes ropes_;
    std::unique_ptr<ggml_threadpool, ThreadpoolDeleter> threadpool_;
    ggml_backend_ptr backend_;
    std::optional<GgmlRowEncoder> encoder_;  // on the CPU
    BatchSlots batch_;
    std::vector<float> hidden_;  // [n_tokens, n_embd] of the batch, on their way to a device
    size_t prefill_bytes_ = 0;
};

}  // namespace lkv
