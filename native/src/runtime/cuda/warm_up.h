// A layer's attention on one slot a region, whose result nobody reads: what it reads and writes in place of the real ones.
#pragma once

#include "decoder/hparams.h"
#include "graph/graph.h"
#include "ops/cuda/gpu/device_memory.h"
#include "runtime/cuda/attention.h"

namespace lkv::cuda {

class WarmUp {
public:
    void attach(const KvCache& cache, const HParams& hparams);
    // Memory for the graph's largest; what is large enough stays, as a graph of another batch comes with every prompt.
    void prepare(const Graph& graph, const PartBytes& parts);
    // plan: of the real one
    cudaError_t run(const Plan& plan, cudaStream_t stream) const;
    // The same of what chooses, before such a plan's attention.
    cudaError_t choose(const Plan& plan, const Chooser& chooser, int row_layer, cudaStream_t stream) const;

private:
    DeviceMemory q_;
    DeviceMemory out_;
    DeviceMemory partial_;
    DeviceMemory partial_ml_;
    DeviceMemory done_;
    DeviceMemory n_slots_;
    DeviceMemory one_step_;  // each token's list: how many, and which
};

}  // namespace lkv::cuda
