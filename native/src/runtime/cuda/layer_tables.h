// What the kernels read of every layer and no batch changes: tables of rows and regions, packed factors, the model's RoPE.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "model/graph.h"
#include "model/model.h"
#include "model/rope.h"
#include "ops/cuda/gpu/device_memory.h"
#include "ops/cuda/plan.h"
#include "runtime/cuda/step_inputs.h"

namespace lkv::cuda {

struct Layer {
    RowTarget targets[max_regions] = {};
    RegionArgs regions[max_regions] = {};
    AttnArgs constant{};  // pointers that no batch changes
    std::vector<DeviceMemory> memory;
    std::map<int, AttnArgs> plans;  // by number of tokens
    bool fitted = false;            // whether storing a decoded token's rows takes long

    template <class T>
    const T* keep(const std::vector<T>& host) {
        memory.push_back(DeviceMemory::of(host));
        return memory.back().template as<T>();
    }
};

struct ModelRope {
    const uint64_t* phases = nullptr;  // null: the model has none
    int32_t n_rot = 0;
    bool neox = false;
    float mscale = 1.0F;
};

class LayerTables {
public:
    // Once. Errors: Error for shapes the kernels do not take.
    void attach(const Model& model, const KvCache& cache, const Rope& rope, const GraphConstants& constants,
                const StepInputs& inputs, const Device& device);

    Layer& operator[](int il) { return layers_[static_cast<size_t>(il)]; }
    int size() const { return static_cast<int>(layers_.size()); }
    const ModelRope& rope() const { return rope_; }
    // Whether the tensor is some layer's E_k or E_q.
    bool is_factor(const ggml_tensor* tensor) const { return factors_.contains(tensor); }

private:
    void attach_shared(const Model& model, const Rope& rope, const GraphConstants& constants, const Device& device);
    void attach_layer(const Model& model, const KvCache& cache, const Rope& rope, const StepInputs& inputs,
                      const Device& device, int il);

    std::vector<Layer> layers_;
    std::set<const ggml_tensor*> factors_;
    ModelRope rope_;
    DeviceMemory slopes_;
    DeviceMemory phases_;
    DeviceMemory angles_;  // tables of the specialized kernel, see AttnArgs
    DeviceMemory rebuilt_angles_;
    DeviceMemory done_;
    std::vector<DeviceMemory> expanded_tables_;
    RegionArgs expanded_{};  // of every layer
};

}  // namespace lkv::cuda
