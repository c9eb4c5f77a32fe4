#include "model/placing.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "base/tensor_context.h"
#include "ggml-alloc.h"
#include "ggml-cpu.h"

namespace lkv {
namespace {

// The buffer type in which the CPU backend multiplies by this weight fastest, or null for the plain one.
ggml_backend_buffer_type_t interleaved_type(ggml_backend_dev_t device, const ggml_tensor* weight) {
    auto* const registry = ggml_backend_dev_backend_reg(device);
    const auto get_types = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_dev_get_extra_bufts"));
    if (get_types == nullptr) {
        return nullptr;
    }
    for (ggml_backend_buffer_type_t* type = get_types(device); type != nullptr && *type != nullptr; type++) {
        const TensorContext scratch = tensor_context(ggml_tensor_overhead() * 4);
        ggml_tensor* const copy = ggml_new_tensor(scratch.get(), weight->type, ggml_n_dims(weight), weight->ne);
        const ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(*type, 0));
        copy->buffer = empty.get();
        ggml_tensor* op = nullptr;
        if (ggml_n_dims(weight) == 3) {
            ggml_tensor* const column = ggml_new_tensor_3d(scratch.get(), GGML_TYPE_F32, weight->ne[0], 1, 512);
            op = ggml_mul_mat_id(scratch.get(), copy, column, ggml_new_tensor_2d(scratch.get(), GGML_TYPE_I32, 1, 512));
        } else {
            op =
                ggml_mul_mat(scratch.get(), copy, ggml_new_tensor_2d(scratch.get(), GGML_TYPE_F32, weight->ne[0], 512));
        }
        const bool fits = ggml_backend_dev_supports_op(device, op);
        copy->buffer = nullptr;
        if (fits) {
            return *type;
        }
    }
    return nullptr;
}

// A copy of the weight in a buffer of this type, in place of the mapped bytes.
ggml_backend_buffer_ptr copied(ggml_tensor* weight, ggml_backend_buffer_type_t type) {
    const void* const source = weight->data;
    ggml_backend_buffer_ptr buffer(
        quietly([&] { return ggml_backend_buft_alloc_buffer(type, ggml_backend_buft_get_alloc_size(type, weight)); }));
    const auto refuse = [&] {
        fail("memory", "expected room for ", weight->name, "; got none in ", ggml_backend_buft_name(type));
    };
    if (buffer == nullptr) refuse();
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    weight->data = nullptr;
    weight->buffer = nullptr;
    void* const base = ggml_backend_buffer_get_base(buffer.get());
    if (ggml_backend_tensor_alloc(buffer.get(), weight, base) != GGML_STATUS_SUCCESS) refuse();
    ggml_backend_tensor_set(weight, source, 0, ggml_nbytes(weight));
    return buffer;
}

}  // namespace

std::vector<ggml_backend_buffer_ptr> interleave(std::span<const LayerWeights> layers) {
    const ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    std::vector<ggml_backend_buffer_ptr> copies;
    size_t bytes = 0;
    for (const LayerWeights& l : layers) {
        std::vector<ggml_tensor*> weights = {l.attn_q,      l.attn_k,     l.attn_v,      l.attn_qkv,   l.attn_output,
                                             l.attn_gate,   l.mla.q,      l.mla.q_a,     l.mla.q_b,    l.mla.kv_a,
                                             l.attn_k_a,    l.attn_v_a,   l.ffn_gate,    l.ffn_up,     l.ffn_down,
                                             l.shared_gate, l.shared_up,  l.shared_down, l.dense_gate, l.dense_up,
                                             l.dense_down,  l.experts_in, l.experts_out};
        if (l.recurrent) {
            std::visit(
                [&](const auto& own) {
                    for (ggml_tensor* const weight : own.largest()) weights.push_back(weight);
                },
                *l.recurrent);
        }
        for (ggml_tensor* weight : weights) {
            if (weight == nullptr || !ggml_is_quantized(weight->type)) continue;
            const ggml_backend_buffer_type_t type = interleaved_type(device, weight);
            if (type == nullptr) continue;
            copies.push_back(copied(weight, type));
            bytes += ggml_nbytes(weight);
        }
    }
    if (bytes > 0) {
        log(LogLevel::info, "weights: ", bytes >> 20, " MiB copied to the CPU's interleaved layout");
    }
    return copies;
}

ggml_backend_buffer_ptr move_weights(std::span<ggml_tensor* const> weights, const Dequantized& dequantized,
                                     const LayerRun& run, ggml_backend_buffer_type_t memory, const char* holds) {
    const std::string where = run.on_gpu() ? "on GPU " + std::to_string(run.gpu) : "on the host";
    const size_t alignment = ggml_backend_buft_get_alignment(memory);
    size_t bytes = 0;
    for (const ggml_tensor* t : weights) bytes += GGML_PAD(ggml_backend_buft_get_alloc_size(memory, t), alignment);
    ggml_backend_buffer_ptr buffer(quietly([&] { return ggml_backend_buft_alloc_buffer(memory, bytes); }));
    if (buffer == nullptr) {
        const bool larger = std::any_of(weights.begin(), weights.end(), [&](auto* t) { return dequantized.has(t); });
        fail("memory", "expected ", bytes >> 20, " MiB ", where, " for the weights; got none; use ",
             larger ? "--weights stored, or " : "", "-ngl auto, fewer layers, or another --tensor-split");
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_tallocr place = ggml_tallocr_new(buffer.get());
    for (ggml_tensor* const t : weights) {
        const void* const source = t->data;
        t->data = nullptr;
        t->buffer = nullptr;
        if (ggml_tallocr_alloc(&place, t) != GGML_STATUS_SUCCESS) {
            fail("memory", "expected room for ", t->name, "; got none ", where);
        }
        dequantized.put(t, source);
    }
    log(LogLevel::info, "weights: ", bytes >> 20, " MiB ", where, ", layers ", run.first_layer, " to ",
        run.end_layer - 1, holds);
    return buffer;
}

}  // namespace lkv
