// Runs ubatches on the model's pipeline stages: claims their slots, draws a graph for each shape, and brings what it results in.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/equal_runs.h"
#include "runtime/pipeline_stage.h"
#include "runtime/plan/session_plan.h"
#include "runtime/row_encoder.h"

namespace lkv {

// Tokens of a batch, in its order.
struct Ubatch {
    std::span<const int32_t> tokens;
    std::span<const int32_t> pos;
    std::span<const int32_t> seq;
    std::span<const int32_t> out_ids;  // indices of those whose results are wanted
    Result result = Result::logits;
    const float* states_before = nullptr;  // [n_tokens, n_embd] of the tokens before these, where the model reads them
    float* states_after = nullptr;         // [n_tokens, n_embd] after the last norm; null: not wanted
};

// Asked for [n, n_vocab or n_embd] floats.
using ResultRoom = std::function<float*(size_t n)>;

// Indices of the tokens whose results are wanted.
std::vector<int32_t> wanted(std::span<const uint8_t> output);

class BatchRunner {
public:
    // Opens the stages, whose devices the cache needs. model: outlives this
    BatchRunner(const Model& model, const SessionPlan& plan);
    // Before anything runs; returns rotated(). cache: outlives this
    unsigned attach(KvCache& cache, bool kv_rotate);

    std::vector<CacheDevice*> devices() const { return devices_of(stages_); }
    ggml_backend_t cpu() const { return backend_.get(); }
    bool fused() const { return fused_; }
    std::string implementation() const;
    size_t compute_bytes() const;
    // Whether full rows of K (bit 0) and V (bit 1) are rotated.
    unsigned rotated() const;

    // Rows go to the cache, results to `rows`. n_guesses: the last tokens of a sequence, which may be removed again. What fails leaves nothing there.
    void run(const Ubatch& ubatch, const EqualRuns& runs, int n_guesses, float* rows);
    // After it: copies of its sequences' recurrent states where they may be wanted again.
    void keep_snapshots(const EqualRuns& ubatch);

    // A lazy prefill, whose stage has all layers: begins a layer, runs ubatches of the prompt through it, and ends it.
    CacheDevice* device() const { return stages_.front().gpu.get(); }
    // Gpu::rows_read of all devices.
    uint64_t rows_read() const;
    void begin_layer(int il, const ExactRows& exact);
    // targets: the tokens' slots in the cache; exact.batch.slots are theirs in the exact rows. hidden: [n_tokens, n_embd] before the
    // layer, and after it
    void run_layer(int il, const Ubatch& ubatch, std::span<const SlotRef> targets, float* k_staged, ExactRows& exact,
                   float* hidden, const ResultRoom& room);
    void end_layer();

private:
    struct ThreadpoolDeleter {
        void operator()(ggml_threadpool* pool) const { ggml_threadpool_free(pool); }
    };
    // The rows that attention reads, and the ubatch's slots there.
    struct Rows {
        const KvCache& cache;
        const BatchSlots& batch;
    };

    void attach_states();
    void claim_states(std::span<const int32_t> seq, const EqualRuns& runs, int n_guesses);
    void commit_states(std::span<const int32_t> pos, const EqualRuns& runs);
    GraphShape graph_shape(const Ubatch& ubatch, const KvCache& rows) const;  // of all layers, on the CPU
    void prepare(PipelineStage& stage, GraphShape shape, const ExactRows* exact = nullptr);
    void compute(const Ubatch& ubatch, const GraphShape& shape, float* rows);
    // Runs the prepared graph.
    void compute(PipelineStage& stage, const Ubatch& ubatch, const Rows& rows);
    void fill_reference_inputs(const Graph& graph, const Rows& rows);

    const Model& model_;
    bool fused_;
    int n_threads_;
    int n_threads_batch_;
    std::vector<PipelineStage> stages_;  // one for each of the model's runs
    Ropes ropes_;
    std::unique_ptr<ggml_threadpool, ThreadpoolDeleter> threadpool_;
    ggml_backend_ptr backend_;
    std::optional<GgmlRowEncoder> encoder_;  // on the CPU
    KvCache* cache_ = nullptr;
    BatchSlots batch_;
    SequenceState::Step step_;   // of the ubatch that runs
    std::vector<float> hidden_;  // [n_tokens, n_embd] of the batch, on their way to a device
};

}  // namespace lkv
