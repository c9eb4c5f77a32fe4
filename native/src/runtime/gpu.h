// Running whole graphs on a GPU. One implementation in a CUDA build (runtime/cuda/executor.cpp), none otherwise (no_gpu.cpp).
#pragma once

#include <memory>
#include <span>
#include <string>

#include "cache/storage.h"
#include "devices/layer_runs.h"
#include "ggml-backend.h"
#include "graph/graph.h"
#include "graph/recurrent/state_tensors.h"

namespace lkv {

// The most tokens of a batch whose K, V and Q a GPU computes concurrently, and of one whose graph it records: those of many sequences too,
// whose launches take longer than their work (1.5B, 9 to 32 tokens: 6.5 ms all).
constexpr int small_batch = 8;
constexpr int recorded_batch = 64;

// What changes in a graph that a GPU runs.
inline void run_on_gpu(GraphShape& shape) {
    shape.on_gpu = true;
    shape.concurrent = shape.n_tokens <= small_batch;
    shape.recorded = shape.n_tokens <= recorded_batch;
}

// What a session on a GPU needs: memory for rows, the layers' tables and factors there, and a way to run a graph.
class Gpu : public CacheDevice {
public:
    virtual std::string name() const = 0;
    // Copies factors, tables and cells of this run's layers there. Call once, before the first graph.
    // Errors: Error for shapes the kernels do not take.
    virtual void attach(const Model& model, const KvCache& cache, const Ropes& ropes, const GraphConstants& constants,
                        const LayerRun& run) = 0;
    // A lazy prefill of one layer begins: its graphs attend to `rows`, a cache of that layer alone, and store into both caches.
    virtual void attach_exact(const Model& model, const KvCache& rows, const LayerCacheSpec& spec, int layer,
                              const Ropes& ropes, const GraphConstants& constants) = 0;
    virtual void detach_exact() = 0;
    // Copies into an input of the next run, without waiting. Before begin().
    virtual void set(ggml_tensor* tensor, const void* data, size_t bytes) = 0;
    // Copies a result of the run into an input of another GPU's next run, which waits for it; the host does not.
    virtual void send(const ggml_tensor* tensor, Gpu& other, ggml_tensor* to) = 0;
    // Waits for the run and copies one of its results; null: only waits. Errors: Error when the device failed.
    virtual void finish(const ggml_tensor* tensor, void* data, size_t bytes) = 0;
    // Memory for n copies of recurrent states, each of so many bytes, ahead of the first.
    virtual void reserve_copies(size_t n, size_t bytes) = 0;
    // Copies what recurrent layers have once all that was started has run, and does not wait for it.
    virtual std::shared_ptr<const StateCopy> copy(std::span<const StateTensors::Piece> pieces) = 0;
    // After a run, under eviction: adds what slots have gathered to the cache's masses.
    virtual void take_masses(KvCache& cache) = 0;
    // Slots of the middle that decoded tokens have chosen so far, of all layers (kv_read). Waits for the runs.
    virtual uint64_t rows_read() = 0;
    // Before each run: positions, sequences and slots of this batch, after the cache claimed them. For every cache that it stores into.
    virtual void begin(const KvCache& cache, const BatchSlots& batch) = 0;
    // A graph was built; what was recorded for the last one is dropped. Errors: Error when ggml's backend lacks one of its ops.
    virtual void prepare(const Graph& graph) = 0;
    // Runs our nodes with our kernels and hands the rest to ggml's own backend, all on one stream. It does not wait.
    virtual ggml_status compute(ggml_cgraph* graph) = 0;
};

std::unique_ptr<Gpu> open_gpu(int gpu);

}  // namespace lkv
