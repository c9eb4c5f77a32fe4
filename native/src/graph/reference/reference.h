// The specification of latent_attn, spelled in stock ggml ops: read every row, rebuild K, score, softmax, weigh V, up-project.
// Slow and context-sized on purpose; the fused implementations are optimisations of this and are tested against it.
#pragma once

#include <map>

#include "decoder/rope.h"
#include "graph/ggml_entry.h"
#include "model/model.h"

namespace lkv {

// Inputs that only this expression needs; the caller fills them before each run. Slots of all regions are concatenated.
struct ReferenceInputs {
    ggml_tensor* slot_pos = nullptr;  // i32 [n_slots], 0 for free slots
    // By sliding window, f32 [n_slots, n_tokens]: −inf where invisible, −(pos(q) − pos(t)) with ALiBi, else 0
    std::map<int, ggml_tensor*> masks;
    // If the layer evicts: weight of each query's mass, f32 [n_tokens, 1], and 1 / temperature, f32 [1, n_tokens]
    ggml_tensor* mass_weight = nullptr;
    ggml_tensor* mass_cold = nullptr;
    int n_slots = 0;
    int n_exact = 0;  // slots of the exact windows, which come first
};

// Same arguments and result as latent_attn(). rope, rope_factors: the layer's RoPE, and its table as ggml_rope_ext takes it. masses: if the
// layer evicts, receives the unfused result of attn_mass(), [n_slots, 1]; else null.
ggml_tensor* latent_attn_reference(ggml_context* ctx, AttentionNode& node, const Model& model, const Rope& rope,
                                   ggml_tensor* rope_factors, const ReferenceInputs& inputs, const Queries& q,
                                   ggml_tensor* stored, ggml_tensor** masses);

// Fills in the masks of this layer's slots in use, for one batch.
void fill_reference_inputs(const KvCache& cache, int layer, const BatchSlots& batch, const HParams& hparams,
                           const ReferenceInputs& inputs);

}  // namespace lkv
