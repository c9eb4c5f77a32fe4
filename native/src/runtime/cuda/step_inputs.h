// What changes from step to step, at addresses that do not: slots in use, positions and sequences of the cache's slots, and where the
// batch's tokens go. So one recorded graph serves a cache as it fills.
#pragma once

#include <memory>
#include <vector>

#include "cache/kv_cache.h"
#include "model/graph.h"
#include "ops/cuda/args.h"
#include "runtime/cuda/memory.h"

namespace lkv::cuda {

class StepInputs {
public:
    // Once, before any step.
    void attach(const KvCache& cache);
    // Enqueues this step's copies, after the cache claimed its slots.
    void begin(const KvCache& cache, const BatchSlots& batch, cudaStream_t stream);
    // Behind the step: shows what it stored, where its tokens attended to their own rows.
    void end(cudaStream_t stream);

    // in_ring: as layers have it whose rows of the middle are in the ring.
    const int32_t* n_slots(bool in_ring) const { return batch_.as<int32_t>() + (in_ring ? max_regions : 0); }
    // Of the exact windows and, behind them, of the batch's own rows; then of the middle.
    const int32_t* n_full() const { return batch_.as<int32_t>() + 2 * max_regions; }
    const int32_t* n_middle(bool in_ring) const { return batch_.as<int32_t>() + 3 * max_regions + (in_ring ? 1 : 0); }
    const int32_t* q_pos() const { return batch_.as<int32_t>() + counts; }
    const int32_t* q_seq() const { return q_pos() + n_ubatch_; }
    const int32_t* region(bool in_ring) const { return q_pos() + (in_ring ? 7 : 2) * n_ubatch_; }
    const int32_t* slot(bool in_ring) const { return q_pos() + (in_ring ? 6 : 3) * n_ubatch_; }
    // the batch's own rows as a region
    const uint64_t* own_seq() const { return reinterpret_cast<const uint64_t*>(q_pos() + 4 * n_ubatch_); }
    const int32_t* pos(int of_region, bool in_ring) const { return pos_[index_of(of_region, in_ring)].as<int32_t>(); }
    const uint64_t* seq(int of_region, bool in_ring) const { return seq_[index_of(of_region, in_ring)].as<uint64_t>(); }

    // Whether this step's tokens should be attended to apart (MlaPlan::apart), and what they then read of the middle; no counts: of a single sequence.
    bool apart(bool in_ring) const { return apart_[in_ring ? 1 : 0]; }
    OwnSteps own_steps(bool in_ring) const;

    // Slots of the exact windows, and of the middle.
    int exact() const { return exact_; }
    int middle(bool in_ring) const { return middle_[in_ring ? 1 : 0]; }
    // Slots of the tiles in use, see AttnArgs::context: in the exact windows, and in the middle.
    int exact_context() const { return exact_context_; }
    int middle_context(bool in_ring) const { return middle_context_[in_ring ? 1 : 0]; }

private:
    static constexpr int counts = 3 * max_regions + 3;  // even, for own_seq
    static size_t batch_words(int n_ubatch) { return counts + 8 * static_cast<size_t>(n_ubatch); }
    // The ring's cells are the last.
    size_t index_of(int region, bool in_ring) const {
        return static_cast<size_t>(in_ring && region == n_regions_ - 1 ? n_regions_ : region);
    }
    void copy_cells(const KvCache& cache, cudaStream_t stream);
    void find_apart(const KvCache& cache, const BatchSlots& batch, cudaStream_t stream);
    // The batch's slots hold its tokens, or none that is seen but by layers that keep no exact tokens: they have no rows else.
    void claim(int n_tokens, bool seen, cudaStream_t stream);

    std::vector<DeviceMemory> pos_;  // per region, and of the ring
    std::vector<DeviceMemory> seq_;
    uint64_t cells_version_ = 0;
    int n_regions_ = 0;
    int exact_ = 0;
    int middle_[2] = {};        // and the ring
    bool ring_is_all_ = false;  // KvCache::ring_is_all
    int exact_context_ = 0;
    int middle_context_[2] = {};
    bool apart_[2] = {};
    DeviceMemory
        own_[2];  // [small_batch] counts, [small_batch][steps of the middle, or of the ring]; none of a single sequence

    // [n_slots of 3 regions | with the ring | n_full of 3 | n_middle | of the ring | pad | pos | seq | region | slot | sequences as bits
    // (two words each) | slot with the ring | region with the ring], each of the last seven n_ubatch long
    DeviceMemory batch_;
    std::unique_ptr<PinnedMemory> pinned_[2];
    int next_pinned_ = 0;
    int n_ubatch_ = 0;
    int n_unseen_ = 0;  // tokens of a batch that attends to its own rows
};

}  // namespace lkv::cuda
