// Which steps of the middle decoded tokens read, of layers that attend to all of them (--kv-read).
#pragma once

#include <memory>
#include <vector>

#include "graph/step/batch.h"
#include "ops/cuda/choice/choice.h"
#include "ops/cuda/gpu/device_memory.h"
#include "ops/cuda/routes.h"
#include "runtime/cuda/layer_tables.h"

namespace lkv::cuda {

class Chooser {
public:
    Chooser(LayerTables& layers, const StepInputs& inputs, const Device& device)
        : layers_(layers), inputs_(inputs), device_(device) {}

    // Once, after the tables. Errors: Error where kernels cannot choose among a layer's rows.
    void attach(const Model& model, const KvCache& cache, const GraphConstants& constants);
    // After the inputs of a step: means of the steps of slots whose tokens have changed.
    void begin(const KvCache& cache, const BatchSlots& batch, cudaStream_t stream);
    // A graph was built, of which a layer's tokens may choose.
    void prepare(const LatentAttnParams& latents, cudaStream_t stream);

    // Whether tokens of this layer's rows ever choose, and whether in this step: more tokens are compressed than they may read.
    bool may_choose(int row_layer, const LatentAttnParams& latents) const {
        return latents.n_tokens > 0 && latents.n_tokens <= most_direct_tokens && !latents.rebuilds() &&
               row_layer < static_cast<int>(means_.size()) && means_[static_cast<size_t>(row_layer)].bytes() > 0;
    }
    bool is_active() const { return active_; }
    // What attention reads then.
    OwnSteps lists() const { return {nullptr, left_.ends.as<int32_t>(), left_.steps.as<int32_t>(), capacity_}; }

    // Estimates for attention as planned, with its queries; then, once the windows have left their parts (or null), the lists.
    cudaError_t score(const Plan& attention, int row_layer, bool beside_windows, cudaStream_t stream);
    cudaError_t choose(const CutProblem* windows, cudaStream_t stream) const;
    // Both of one step, into nothing, beside the layer before: their instructions are in the caches then.
    cudaError_t warm_up(const Plan& attention, int row_layer, cudaStream_t stream) const;

    // Slots of the middle that all layers' tokens have chosen so far. Waits for the device.
    uint64_t rows_read() const;

private:
    LayerTables& layers_;
    const StepInputs& inputs_;
    const Device& device_;
    int kv_read_ = 0;   // tokens that may be read; 0: all
    int capacity_ = 0;  // steps of the middle
    bool active_ = false;
    std::vector<DeviceMemory> means_;  // of every layer, in rows like K's; none of those that read all
    DeviceMemory averaged_;            // AveragedRows of those that have some
    int n_averaged_ = 0;
    int most_width_ = 0;
    uint64_t since_ = 0;              // Cells::n_changes of the last means
    std::vector<int32_t> unwritten_;  // steps that the last batch's rows went to, after the means
    DeviceMemory changed_;            // steps, listed
    std::unique_ptr<PinnedMemory> pinned_[2];
    int next_pinned_ = 0;
    ChoiceArgs args_of(const Plan& attention, int row_layer) const;

    // What a choice leaves.
    struct Left {
        DeviceMemory estimates, sums, weights, done, ends, steps, rows_read;

        void hold(size_t n_tokens, size_t n_heads, size_t n_steps, cudaStream_t stream);
        void lend(ChoiceArgs& args) const;
    };
    Left left_;
    Left of_warm_up_;
    ChoiceArgs args_{};  // of the layer that is scored
};

}  // namespace lkv::cuda
