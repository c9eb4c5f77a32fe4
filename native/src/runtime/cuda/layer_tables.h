// What the kernels read of every layer and no batch changes: tables of rows and regions, packed factors, RoPE.
#pragma once

#include <compare>
#include <map>
#include <vector>

#include "decoder/rope.h"
#include "graph/graph.h"
#include "model/model.h"
#include "ops/cuda/attend.h"
#include "ops/cuda/choice/choice.h"
#include "ops/cuda/full/full_rows.h"
#include "ops/cuda/gpu/device_memory.h"
#include "ops/cuda/rows/rows.h"
#include "ops/cuda/rows/tables.h"
#include "ops/cuda/softmax/merge.h"
#include "runtime/cuda/step_inputs.h"

namespace lkv::cuda {

// What one number of tokens has several plans for. All of it changes from step to step.
struct PlanFor {
    bool expanded = false;       // keys are made of latents: queries stay as they are
    bool apart = false;          // see Problem::own
    bool chosen = false;         // tokens read the steps that they choose, see Chooser
    bool windows_alone = false;  // of a problem with the middle, whose slots are all free

    auto operator<=>(const PlanFor&) const = default;
};

// Attention over rows of one form, see latent_attn.h.
struct ProblemTables {
    RegionArgs regions[max_regions] = {};
    Problem constant{};                               // pointers that no batch changes
    std::map<const Kernel*, const uint32_t*> packed;  // what kernels made of K's factor
    std::map<std::pair<int, PlanFor>, Plan> plans;    // by number of tokens
};

struct Layer {
    RowTarget targets[max_regions] = {};
    ProblemTables full;  // rows of the exact windows where these are full ones; after them the batch's own
    ProblemTables latents;
    FullRows full_rows{};          // what makes those
    EncodeSide encoders[2] = {};   // K, V, of what leaves the recent window
    bool splits = false;           // whether there is `full`
    bool in_token_blocks = false;  // K of the middle is
    bool in_ring = false;          // Placement::in_ring
    int cells = 0;                 // StepInputs::cells_of
    bool middle_alone = false;     // whether `latents` is of the middle alone, or of the ring in its place
    std::vector<DeviceMemory> memory;
    ScoredUnits scored{};  // of K of `latents`, where tokens choose what they read
    Sinks sinks{};         // no logits: none
    bool fitted = false;   // whether storing a decoded token's rows takes long
    RowPlan whole;         // f16 rows of whole heads

    template <class T>
    const T* keep(const std::vector<T>& host) {
        if (host.empty()) return nullptr;
        memory.push_back(DeviceMemory::of(host));
        return memory.back().template as<T>();
    }
};

// What layers that turn alike share.
struct RopeTables {
    int32_t n_rot = 0;  // 0: nothing is turned
    bool neox = false;
    float mscale = 1.0F;
    DeviceMemory phases;
};

// Cut::done of the layer that counts most.
int most_counters(const HParams& hparams);

class LayerTables {
public:
    // Once, of this run's layers. Errors: Error for shapes the kernels do not take.
    void attach(const Model& model, const KvCache& cache, const Ropes& ropes, const GraphConstants& constants,
                const LayerRun& run, const StepInputs& inputs);
    // The same of a cache that holds one layer of the model alone, in rows as `spec` has them.
    void attach_alone(const Model& model, const KvCache& cache, const LayerCacheSpec& spec, int layer,
                      const Ropes& ropes, const GraphConstants& constants, const StepInputs& inputs);

    // By the cache's layer.
    Layer& operator[](int il) { return layers_[static_cast<size_t>(il)]; }
    // The layers of the cache that are on this device.
    const LayerRun& run() const { return run_; }
    // By the table that ggml's RoPE reads, see GraphConstants; null: none of these.
    const RopeTables* rope_of(const ggml_tensor* factors) const;
    // The regions of `full` as kernels read them: raw keys finished, after the windows the batch's own rows.
    void describe_full(const Layer& layer, LatentAttnParams& params, bool with_own) const;
    // Memory for the own rows of batches of so many tokens, K and V.
    void hold_own(int n_tokens);
    uint8_t* own_rows(bool value_side) const { return own_[value_side ? 1 : 0].as<uint8_t>(); }

    uint32_t* done() const { return done_.as<uint32_t>(); }  // Cut::done

private:
    void attach_shared(const Model& model, const Ropes& ropes, const GraphConstants& constants);
    // row_layer: of the cache
    void attach_layer(const Model& model, const KvCache& cache, const LayerCacheSpec& spec, const RopeTables& rope,
                      const StepInputs& inputs, int il, int row_layer);
    void attach_common(Problem& problem, const RegionArgs& whole, const StepInputs& inputs) const;
    void attach_full(const Model& model, const KvCache& cache, const RopeTables& rope, const StepInputs& inputs,
                     int il);

    std::vector<Layer> layers_;  // of the cache; empty ones where they are elsewhere
    LayerRun run_;
    size_t whole_bytes_ = 0;  // of a row of whole heads, where it is widest
    DeviceMemory finished_;   // keys of the exact windows, of one layer at a time
    DeviceMemory own_[2];     // K, V of a batch

    std::vector<RopeTables> ropes_;                 // as Ropes::tables
    std::vector<const ggml_tensor*> rope_factors_;  // and GraphConstants::rope_factors
    DeviceMemory slopes_;
    DeviceMemory done_;
};

}  // namespace lkv::cuda
