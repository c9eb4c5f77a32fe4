// The specification of latent_attn, spelled in stock ggml ops: read every row, rebuild K, score, softmax, weigh V, up-project.
// Slow and context-sized on purpose; the fused implementations are optimisations of this and are tested against it.
#pragma once

#include <map>

#include "model/model.h"
#include "model/rope.h"
#include "ops/ggml_entry.h"

namespace lkv {

// Inputs that only this expression needs; the caller fills them before each run. Slots of all regions are concatenated.
struct ReferenceInputs {
    ggml_tensor* slot_pos = nullptr;  // i32 [n_slots], 0 for free slots
    // By sliding window, f32 [n_slots, n_tokens]: −inf where invisible, −(pos(q) − pos(t)) with ALiBi, else 0
    std::map<int, ggml_tensor*> masks;
    int n_slots = 0;
    int n_exact = 0;  // of them those of the exact windows, which come first
};

// Same arguments and result as latent_attn(). rope, rope_factors: of the layer, and its table as ggml_rope_ext takes it.
ggml_tensor* latent_attn_reference(ggml_context* ctx, AttentionNode& node, const Model& model, const Rope& rope,
                                   ggml_tensor* rope_factors, const ReferenceInputs& inputs, const Queries& q,
                                   ggml_tensor* stored);

// The masks of the slots in use, for one batch: as the layers have them whose rows of the middle are in the ring, or the others.
void fill_reference_inputs(const KvCache& cache, bool in_ring, const BatchSlots& batch, const HParams& hparams,
                           const ReferenceInputs& inputs);

}  // namespace lkv
