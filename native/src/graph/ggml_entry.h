// The one place where our ops enter ggml: as ggml_custom_4d nodes, which the CPU backend calls and the GPU's executor
// (runtime/cuda/executor.cpp) replaces. Kernels beyond it include no ggml header.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ggml.h"
#include "graph/step/batch.h"
#include "ops/cpu/attn_mass.h"
#include "ops/cpu/latent_attn.h"
#include "ops/latent_attn.h"

namespace lkv {

// One layer's attention in one graph. Its address is the nodes' userdata: it outlives the graph and does not move.
// With exact windows of full rows it consists of two problems with one softmax (Rows::is_full).
struct AttentionNode {
    KvCache* cache = nullptr;
    const BatchSlots* batch = nullptr;
    int layer = 0;      // index in the model
    int row_layer = 0;  // index in the cache: the same, or 0 if the cache holds this layer only
    // everything except q, out, q_pos, q_seq and the regions, which each run fills in
    std::optional<LatentAttnParams> full;     // the full rows of exact windows
    std::optional<LatentAttnParams> latents;  // all other regions; none while they are empty
    LatentAttnPlan full_plan{};
    LatentAttnPlan latents_plan{};
    AttnMassPlan mass_plan{};
    int mass_rows = 1;      // rows of masses that store_masses sums
    int latent_source = 0;  // index of the latents' K among store_rows' sources; full rows come before it
    bool on_gpu = false;    // the graph runs on the GPU: nodes carry the op's name only
    int v_hadamard = 0;     // on the GPU: results leave times a Hadamard matrix of so many channels; 0: as they are

    // The cache's regions that belong to a problem.
    void list_regions(bool full_rows, LatentAttnParams& params) const;
    // A problem as it is in this run.
    LatentAttnParams run_params(bool full_rows, const ggml_tensor* q, float* out) const;
};

// K and V of a batch, f32 contiguous, all groups of a row: [width, n_tokens].
struct BatchRows {
    ggml_tensor* k;
    ggml_tensor* v;
};

// Writes the batch's rows of this layer. full: what regions of full rows store (Rows::is_full). latents: what others do. Either may be
// absent where no token of the batch needs it. Returns a token tensor: whatever reads the rows must depend on it.
ggml_tensor* store_rows(ggml_context* ctx, AttentionNode& node, const std::optional<BatchRows>& full,
                        const std::optional<BatchRows>& latents);

// q [q_width, n_head, n_tokens] of each problem, f32 contiguous; null where the node has none.
struct Queries {
    ggml_tensor* full;
    ggml_tensor* latents;
};

// The fused op. Returns [head_dim, n_head, n_tokens].
ggml_tensor* latent_attn(ggml_context* ctx, AttentionNode& node, const Queries& q, ggml_tensor* stored, int n_threads);

// The masses that this layer's slots receive from the batch's queries (ops/attn_mass.h), [slots in use, KV heads] and scratch. On a
// GPU, where `stored` is the layer's attention, masses stay there until Gpu::take_masses: a token tensor.
ggml_tensor* attn_mass(ggml_context* ctx, AttentionNode& node, const Queries& q, ggml_tensor* stored, int n_threads);

// Adds masses [slots in use, mass_rows] to those that the cache keeps of this layer. On the CPU.
ggml_tensor* store_masses(ggml_context* ctx, AttentionNode& node, ggml_tensor* masses);

// Noise of the masses' scores, [n_slots, n_tokens, n_head], slots of both problems in the order of read_rows. For the reference.
ggml_tensor* mass_noise(ggml_context* ctx, AttentionNode& node, ggml_tensor* stored, int n_slots, int n_tokens,
                        int n_head);

// The last problem's queries of an attention node for the GPU. Its sources are [queries, stored rows, what these were stored from …] and,
// with full rows, the latents' queries.
const ggml_tensor* last_queries(const ggml_tensor* attention);

// Every slot's uncompressed row in the regions of full rows, or in the others, f32: [width, slots in use there]; channels that a region
// dropped are zero. side: false K, true V. For the reference expression.
ggml_tensor* read_rows(ggml_context* ctx, AttentionNode& node, ggml_tensor* stored, bool full, bool value_side,
                       int n_slots);

// The GPU's executor recognizes our nodes by these functions; their userdata is an AttentionNode. They are never called.
void gpu_store_node(ggml_tensor* dst, int ith, int nth, void* userdata);
void gpu_attend_node(ggml_tensor* dst, int ith, int nth, void* userdata);
void gpu_mass_node(ggml_tensor* dst, int ith, int nth, void* userdata);

}  // namespace lkv
