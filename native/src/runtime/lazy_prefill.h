// Lazy prefill: a prompt attends to its own K and V as they are before compression, and its rows are compressed when they
// are written. All ubatches pass one layer before any passes the next, so the peak is one layer's exact rows of the prompt
// (f32) beside its hidden states; and, where K lies in blocks, what waits to be written when the layer is through.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "cache/kv_cache.h"
#include "model/model.h"

namespace lkv {

// What in the file stands in the way, as the end of "expected …, as "; empty: nothing. Latents that are cut when they are
// made never were exact; keys that are projected after RoPE are whole before.
std::string lazy_obstacle(const Model& model);

// What exact rows of a layer look like: one segment per group, keys before any projection behind RoPE.
LayerCacheSpec exact_layer_spec(const Model& model, int layer);

// One region of f32 rows of one layer.
KvCache exact_cache(const Model& model, const LayerCacheSpec& spec, int n_tokens, bool allocate = true);

// Exact rows of the largest layer, hidden states and what waits for blocks: of a prompt that fills the cache.
size_t lazy_prefill_bytes(const Model& model, const KvCache& cache);

// Rows of K of one layer that wait until their block is complete: f32 [n_tokens, K width], none where K is in single rows.
std::vector<float> stage_k_rows(const KvCache& cache, int layer, size_t n_tokens);
// Writes the blocks among `targets`, as claim_settled() gave them. staged: of stage_k_rows(), filled.
void write_staged_blocks(KvCache& cache, int layer, std::span<const SlotRef> targets, std::span<const float> staged);

}  // namespace lkv
