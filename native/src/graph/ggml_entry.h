// The one place where our ops enter ggml: as ggml_custom_4d nodes, which the CPU backend calls and the GPU's executor
// (runtime/cuda/executor.cpp) replaces. Kernels behind it know no ggml.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cache/kv_cache.h"
#include "ggml.h"
#include "ops/cpu/attn_mass.h"
#include "ops/cpu/latent_attn.h"
#include "ops/latent_attn.h"

namespace lkv {

// What a ubatch asks of the cache; filled before each graph run, read by every layer's nodes.
struct BatchSlots {
    std::vector<int32_t> pos;    // [n_tokens]
    std::vector<int32_t> seq;    // [n_tokens]
    std::vector<SlotRef> slots;  // [n_tokens] where each token's row goes
    // The tokens attend to each other's rows as they come, before any format: the cache shows these from the next batch on.
    bool own_rows = false;
    // [n_tokens, K width] where rows of K wait that go to a block, in the memory of the cache's rows; null: none does
    float* k_staged = nullptr;
};

// One layer's attention in one graph. Its address is the nodes' userdata: it outlives the graph and does not move.
// Beside exact windows of full rows it is two problems with one softmax (KvCache::is_full).
struct AttentionNode {
    KvCache* cache = nullptr;
    const BatchSlots* batch = nullptr;
    int layer = 0;      // of the model
    int row_layer = 0;  // of the cache: the same, or 0 where the cache holds this layer alone
    // everything but q, out, q_pos, q_seq and the regions, which a run fills in
    std::optional<LatentAttnParams> full;     // of the exact windows' full rows
    std::optional<LatentAttnParams> latents;  // of every other region; none while it is empty
    LatentAttnPlan full_plan{};
    LatentAttnPlan latents_plan{};
    AttnMassPlan mass_plan{};
    int mass_rows = 1;      // rows of masses that store_masses sums
    int latent_source = 0;  // of store_rows: which of its sources is the latents' K; before it those of full rows
    bool on_gpu = false;    // the graph runs on the GPU: nodes carry the op's name only

    // The cache's regions that belong to a problem.
    void list_regions(bool full_rows, LatentAttnParams& params) const;
};

// K and V of a batch, f32 contiguous, all groups of a row: [width, n_tokens].
struct BatchRows {
    ggml_tensor* k;
    ggml_tensor* v;
};

// Writes the batch's rows of this layer. full: what regions of full rows store (KvCache::is_full). latents: what others do. Either may be
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

// What this layer's slots gather from the batch's queries (ops/attn_mass.h), [slots in use, KV heads] and what it took to compute it. On a
// GPU, where `stored` is the layer's attention, masses stay there until Gpu::take_masses: a token tensor.
ggml_tensor* attn_mass(ggml_context* ctx, AttentionNode& node, const Queries& q, ggml_tensor* stored, int n_threads);

// Adds masses [slots in use, mass_rows] to those that the cache keeps of this layer. On the CPU.
ggml_tensor* store_masses(ggml_context* ctx, AttentionNode& node, ggml_tensor* masses);

// Noise of the masses' scores, [n_slots, n_tokens, n_head], slots of both problems in the order of read_rows. For the reference.
ggml_tensor* mass_noise(ggml_context* ctx, AttentionNode& node, ggml_tensor* stored, int n_slots, int n_tokens,
                        int n_head);

// Of an attention node for the GPU, whose sources are [queries, stored rows, what these were stored from …] and, beside full rows, the
// latents' queries: the last problem's queries.
const ggml_tensor* last_queries(const ggml_tensor* attention);

// Every slot's uncompressed row in the regions of full rows, or in the others, f32: [width, slots in use there]; channels that a region
// dropped are zero. side: false K, true V. For the reference expression.
ggml_tensor* read_rows(ggml_context* ctx, AttentionNode& node, ggml_tensor* stored, bool full, bool value_side,
                       int n_slots);

// How the GPU's executor knows our nodes: these are their functions, and their userdata is an AttentionNode. Never called.
void gpu_store_node(ggml_tensor* dst, int ith, int nth, void* userdata);
void gpu_attend_node(ggml_tensor* dst, int ith, int nth, void* userdata);
void gpu_mass_node(ggml_tensor* dst, int ith, int nth, void* userdata);

}  // namespace lkv
