// Masses of eviction: what slots gather in a run stays on the GPU, layer by layer, until the host adds it to the cache's, where policies
// look at it.
#pragma once

#include <memory>
#include <vector>

#include "ops/cuda/gpu/device_memory.h"
#include "runtime/cuda/attention.h"

namespace lkv::cuda {

class Masses {
public:
    Masses(LayerTables& layers, const StepInputs& inputs, Attention& attention, const Device& device)
        : layers_(layers), inputs_(inputs), attention_(attention), device_(device) {}

    // Once, before any graph.
    void attach(const KvCache& cache);
    // Behind Attention::prepare of the same graph.
    void prepare(const Graph& graph, cudaStream_t stream);
    // After the layer's attention, whose plans and finished keys it reads. dst: as attn_mass made it
    cudaError_t add_up(const ggml_tensor* dst, const AttentionNode& node, cudaStream_t stream);
    // Waits for the run.
    void take(KvCache& cache, cudaStream_t stream);

private:
    MassArgs args_of(const AttentionNode& node);
    // Where a region's slots of a layer begin, counted from the first mass; -1: they have no masses.
    int64_t place(const KvCache& cache, int region, int layer) const;

    LayerTables& layers_;
    const StepInputs& inputs_;
    Attention& attention_;
    const Device& device_;
    std::vector<int64_t> first_;  // of every layer that evicts
    int n_recent_ = 0;            // slots
    DeviceMemory parts_;          // of one layer at a time
    DeviceMemory masses_;         // per layer that evicts [slots of the recent region], [slots of its middle]
    std::unique_ptr<PinnedMemory> copy_;
};

}  // namespace lkv::cuda
