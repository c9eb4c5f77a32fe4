// Lazy prefill: a prompt attends to its own K and V as they are before compression, and its rows are compressed when they
// are written. All ubatches pass one layer before any passes the next, so the peak is one layer's exact rows of the prompt
// (f32; on a GPU f16, as which its kernels read them) beside its hidden states, which are the host's; and, where K lies in token blocks, what
// waits to be written when the layer is through.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/kv_cache.h"
#include "model/model.h"
#include "runtime/batch_runner.h"

namespace lkv {

// What in the file stands in the way, as the end of "expected …, as "; empty: nothing. Latents that are cut when they are
// made never were exact; keys that are projected after RoPE are whole before.
std::string lazy_obstacle(const Model& model);

// What exact rows of a layer look like: one segment per group, keys before any projection after RoPE.
LayerCacheSpec exact_layer_spec(const Model& model, int layer);

// One region of exact rows of one layer, for ubatches of a session with `options`. device: as for the session's own cache
KvCache exact_cache(const Model& model, const LayerCacheSpec& spec, int layer, int n_tokens,
                    const KvCacheOptions& options, bool allocate = true, CacheDevice* device = nullptr);

// Exact rows of the largest layer, hidden states and what waits for blocks: of a prompt that fills the cache.
size_t lazy_prefill_bytes(const Model& model, const KvCache& cache);

// Rows of K of one layer that wait until their block is complete: f32 [n_tokens, K width].
class StagedKeys {
public:
    // None where K is in single rows. device: where the cache's rows are; null = the host
    StagedKeys(KvCache& cache, int layer, size_t n_tokens, CacheDevice* device);

    size_t bytes() const { return bytes_; }
    float* row(size_t token) const;  // null: none waits
    // Writes the blocks among `targets`, as claim() gave them, of the rows that are filled by now.
    void write(std::span<const SlotRef> targets);

private:
    KvCache& cache_;
    CacheDevice* device_;
    int layer_;
    size_t width_;
    size_t bytes_;
    std::unique_ptr<CacheStorage> rows_;
};

class LazyPrefill {
public:
    // What Session::decode() was called with.
    struct Prompt {
        std::span<const int32_t> tokens;
        std::span<const int32_t> pos;
        std::span<const int32_t> seq;
        std::span<const uint8_t> output;
        const ResultRoom& room;
        const std::function<void()>& between_ubatches;
        Result result;
    };

    // All arguments outlive this.
    LazyPrefill(const Model& model, KvCache& cache, BatchRunner& runner)
        : model_(model), cache_(cache), runner_(runner) {}

    // Whether all of a batch's sequences begin with it.
    bool starts(std::span<const int32_t> seq) const;
    // The prompt is in the cache whole, or not at all.
    void run(const Prompt& prompt);
    size_t bytes() const { return bytes_; }  // the most that a prompt has taken

private:
    // hidden: [n_tokens, n_embd], states before the layer and then after it
    void run_layer(int il, const Prompt& prompt, std::span<const SlotRef> targets, ExactRows& exact,
                   const StagedKeys& staged, std::span<float> hidden);

    const Model& model_;
    KvCache& cache_;
    BatchRunner& runner_;
    size_t bytes_ = 0;
};

}  // namespace lkv
