// A pipeline stage: consecutive layers on one device, and what runs their graph there, the CPU's backend or a GPU.
#pragma once

#include <memory>
#include <vector>

#include "graph/graph.h"
#include "graph/recurrent/state_tensors.h"
#include "runtime/gpu.h"

namespace lkv {

// Its graph reads the hidden states of the stage before it, and leaves those of the next.
struct PipelineStage {
    // Opens the run's GPU, if it has one.
    explicit PipelineStage(const LayerRun& run);

    LayerRun run;
    std::unique_ptr<Gpu> gpu;  // null: the CPU
    GraphConstants constants;
    std::unique_ptr<StateTensors> states;  // of its recurrent layers; null: the model has none
    ggml_gallocr_ptr allocator;
    GraphShape shape;
    std::unique_ptr<Graph> graph;  // the last one: decoding keeps its shape, so it is reused

    bool on_gpu() const { return gpu != nullptr; }
    // Null tensors: nothing is copied. A result is waited for, on a GPU without one, too.
    void set_input(ggml_tensor* tensor, const void* data, size_t bytes) const;
    void get_result(const ggml_tensor* tensor, float* data) const;
    // The hidden states that this stage has run for, to the one after it.
    void hand_to(const PipelineStage& next) const;
    // Runs the prepared graph; a GPU's run is waited for where its result is wanted. Errors: Error when it does not run.
    void compute(ggml_backend_t cpu) const;
    // For the case of a failure: waits until the stage's work has ended, and ignores its result.
    void abandon() const noexcept;
};

std::vector<PipelineStage> open_stages(const std::vector<LayerRun>& runs);

// Where rows are, of every stage.
std::vector<CacheDevice*> devices_of(const std::vector<PipelineStage>& stages);

}  // namespace lkv
