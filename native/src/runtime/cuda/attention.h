// Our two nodes of a layer, launched: rows are stored, then attended to.
#pragma once

#include <set>

#include "ggml.h"
#include "runtime/cuda/layer_tables.h"
#include "runtime/cuda/slots/chooser.h"

namespace lkv::cuda {

// What one of our nodes was made with. function: what it is
const AttentionNode& attention_of(const ggml_tensor* node, ggml_custom_op_t* function = nullptr);

// Bytes that attention leaves parts in.
struct PartBytes {
    size_t sums = 0;
    size_t maxima = 0;

    void hold(size_t sum_floats, size_t maximum_floats);
};

// What the parts of one problem lie in.
struct PartMemory {
    DeviceMemory sums;
    DeviceMemory maxima;

    bool holds(const PartBytes& bytes) const { return bytes.sums <= sums.bytes() && bytes.maxima <= maxima.bytes(); }
    void lend(Cut& args) const {
        args.partial = sums.as<float>();
        args.partial_ml = maxima.as<float>();
    }
};

class Attention {
public:
    Attention(LayerTables& layers, const StepInputs& inputs, Chooser& chooser, const Device& device)
        : layers_(layers), inputs_(inputs), chooser_(chooser), device_(device) {}

    // A graph was built: plans for its nodes, and memory for what the largest leaves; returns what their warm-ups need. Errors: Error for
    // shapes the kernels do not take.
    PartBytes prepare(const Graph& graph, cudaStream_t stream);

    // Slots that the prepared graph's launches are for, at least those in use: where a layer takes chunks of the context, their number is
    // on the host. 0: none does, a recorded step serves a cache as it fills.
    int launched_slots(bool in_ring) const;

    // full: of the problem of full rows. Null where the node has no such problem.
    const Plan* plan(const AttentionNode& node, bool full);
    // Whether its tokens choose what they read.
    bool chooses(const Plan& plan) const { return plan.apart != 0 && plan.own.ends == chooser_.lists().ends; }
    // What else than slots a recorded step depends on.
    int variant() const;

    // A graph was built, of which prepare() hears or, of a lazy prefill, another's does.
    void find_rotations(const Graph& graph);
    // Whether storing V's rows does this: their Hadamard rotation, of few tokens.
    bool stores_rotated(const ggml_tensor* node) const { return rotated_by_store_.contains(node); }
    // K's rows, V's, or both
    cudaError_t store(const ggml_tensor* dst, const AttentionNode& node, bool with_k, bool with_v, cudaStream_t stream);
    // Attention to full rows, if the node has any: its result, or parts for the latents after it.
    cudaError_t attend_full(const ggml_tensor* dst, const AttentionNode& node, cudaStream_t stream);
    // What attention to latents beside full rows may do before these have been attended to; then the rest. Latents alone: all at once.
    cudaError_t begin_latents(const ggml_tensor* dst, const AttentionNode& node, cudaStream_t stream);
    cudaError_t end_latents(const ggml_tensor* dst, const AttentionNode& node, cudaStream_t stream);

private:
    const Plan* plan(const AttentionNode& node, bool full, PlanFor as);
    static Reads reads(const Layer& layer, bool full);
    // Whether a layer has two kinds of rows in one problem: until there are blocks of tokens, kernels of full rows take less time.
    bool begins_with_windows(const Layer& layer) const {
        return layer.in_token_blocks && layer.cells == 0 && !layer.splits && inputs_.exact() > 0;
    }
    Plan run_args(const ggml_tensor* dst, const AttentionNode& node, bool full);
    // A whole softmax over one problem and the layer's sinks.
    cudaError_t attend_alone(const Plan& args, const Sinks& sinks, cudaStream_t stream);
    Plan latent_args(const ggml_tensor* dst, const AttentionNode& node);

    LayerTables& layers_;
    const StepInputs& inputs_;
    Chooser& chooser_;
    const Device& device_;
    std::set<const ggml_tensor*> rotated_by_store_;
    PartMemory full_parts_;
    PartMemory parts_;
    PartMemory sink_parts_;
    // Slots of the tiles that attention to latents reads.
    int context(bool middle_alone, bool in_ring) const {
        return (middle_alone ? 0 : inputs_.exact_context()) + inputs_.middle_context(in_ring);
    }
    // For the prepared graph's layers, then for those in the ring: the fewest slots that one takes at once (Plan::chunk), 0: none does; and whether
    // all have the middle alone for their latents.
    int chunk_[2] = {};
    bool middle_alone_[2] = {};
};

}  // namespace lkv::cuda
