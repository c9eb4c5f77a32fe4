// States of the recurrent layers of one device, as ggml tensors that graphs read and write.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/tensor_context.h"
#include "cache/recurrent/state_memory.h"
#include "decoder/hparams.h"
#include "devices/layer_runs.h"
#include "ggml-cpp.h"

namespace lkv {

class StateTensors : public StateMemory {
public:
    StateTensors() = default;
    // With allocate = false graphs can be built, but not run (forecast). Errors: Error where there is no room.
    StateTensors(const HParams& hparams, const LayerRun& run, int n_slots, ggml_backend_buffer_type_t memory,
                 bool allocate = true);

    // Null for a layer that attends, or is not in the run, and for what its kind has none of. [floats of a state, n_slots]
    ggml_tensor* conv(int layer) const { return of(layer).conv; }
    ggml_tensor* matrices(int layer) const { return of(layer).matrices; }

    size_t slot_bytes() const override { return slot_bytes_; }
    void read(int slot, uint8_t* to) const override;
    void write(int slot, const uint8_t* from) override;
    void clear(int slot) override;
    std::shared_ptr<const StateCopy> copy(int slot) const override;

    // Copies by a device that works on while they are made. Else they are made at once.
    struct Piece {
        const void* from;  // of the device
        size_t bytes;
    };
    using CopyBy = std::function<std::shared_ptr<const StateCopy>(std::span<const Piece>)>;
    void copy_by(CopyBy device) { copy_by_ = std::move(device); }

private:
    struct Layer {
        ggml_tensor* conv = nullptr;
        ggml_tensor* matrices = nullptr;
    };
    const Layer& of(int layer) const { return layers_[static_cast<size_t>(layer)]; }
    template <typename F>
    void each_row(int slot, F&& visit) const;  // visit(tensor, offset, bytes)

    TensorContext context_;
    ggml_backend_buffer_ptr buffer_;
    std::vector<Layer> layers_;  // of the model
    size_t slot_bytes_ = 0;
    CopyBy copy_by_;
};

}  // namespace lkv
