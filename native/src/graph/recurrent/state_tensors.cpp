#include "graph/recurrent/state_tensors.h"

#include "base/error.h"
#include "base/log.h"

namespace lkv {

StateTensors::StateTensors(const HParams& h, const LayerRun& run, int n_slots, ggml_backend_buffer_type_t memory,
                           bool allocate)
    : layers_(static_cast<size_t>(h.n_layer)) {
    context_ = tensor_context(ggml_tensor_overhead() * (2 * layers_.size() + 1));
    for (int il = run.first_layer; il < run.end_layer; il++) {
        if (!h.recurs(il)) continue;
        Layer& layer = layers_[static_cast<size_t>(il)];
        layer.conv = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, h.conv_floats(), n_slots);
        if (const int64_t n = h.matrix_floats(); n > 0) {
            layer.matrices = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, n, n_slots);
        }
        slot_bytes_ += static_cast<size_t>(h.state_floats()) * sizeof(float);
    }
    if (slot_bytes_ == 0) return;
    if (!allocate) {
        // an address that nobody reads: the allocator of a graph leaves such tensors alone
        each_row(0, [](ggml_tensor* t, size_t, size_t) { t->data = reinterpret_cast<void*>(sizeof(void*)); });
        return;
    }
    buffer_.reset(quietly([&] { return ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), memory); }));
    if (buffer_ == nullptr) {
        fail("memory", "expected ", (slot_bytes_ * static_cast<size_t>(n_slots)) >> 20,
             " MiB for the states of recurrent layers; got none; lower n_seq_max (-np)");
    }
    ggml_backend_buffer_clear(buffer_.get(), 0);
}

template <typename F>
void StateTensors::each_row(int slot, F&& visit) const {
    for (const Layer& layer : layers_) {
        for (ggml_tensor* const t : {layer.conv, layer.matrices}) {
            if (t != nullptr) visit(t, static_cast<size_t>(slot) * t->nb[1], t->nb[1]);
        }
    }
}

void StateTensors::read(int slot, uint8_t* to) const {
    each_row(slot, [&](ggml_tensor* t, size_t offset, size_t bytes) {
        ggml_backend_tensor_get(t, to, offset, bytes);
        to += bytes;
    });
}

void StateTensors::write(int slot, const uint8_t* from) {
    each_row(slot, [&](ggml_tensor* t, size_t offset, size_t bytes) {
        ggml_backend_tensor_set(t, from, offset, bytes);
        from += bytes;
    });
}

std::shared_ptr<const StateCopy> StateTensors::copy(int slot) const {
    if (!copy_by_) return StateMemory::copy(slot);
    std::vector<Piece> pieces;
    each_row(slot, [&](const ggml_tensor* t, size_t offset, size_t bytes) {
        pieces.push_back({static_cast<const uint8_t*>(t->data) + offset, bytes});
    });
    return copy_by_(pieces);
}

void StateTensors::clear(int slot) {
    each_row(slot,
             [](ggml_tensor* t, size_t offset, size_t bytes) { ggml_backend_tensor_memset(t, 0, offset, bytes); });
}

}  // namespace lkv
