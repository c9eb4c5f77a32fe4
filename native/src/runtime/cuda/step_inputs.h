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

    const int32_t* n_slots() const { return batch_.as<int32_t>(); }
    // Of the exact windows and, behind them, of the batch's own rows; then of the middle.
    const int32_t* n_full() const { return batch_.as<int32_t>() + max_regions; }
    const int32_t* n_middle() const { return batch_.as<int32_t>() + 2 * max_regions; }
    const int32_t* q_pos() const { return batch_.as<int32_t>() + counts; }
    const int32_t* q_seq() const { return q_pos() + n_ubatch_; }
    const int32_t* region() const { return q_pos() + 2 * n_ubatch_; }
    const int32_t* slot() const { return q_pos() + 3 * n_ubatch_; }
    // the batch's own rows as a region
    const uint64_t* own_seq() const { return reinterpret_cast<const uint64_t*>(q_pos() + 4 * n_ubatch_); }
    const int32_t* pos(int of_region) const { return pos_[static_cast<size_t>(of_region)].as<int32_t>(); }
    const uint64_t* seq(int of_region) const { return seq_[static_cast<size_t>(of_region)].as<uint64_t>(); }

    int capacity() const { return capacity_; }  // slots of all regions
    int middle() const { return middle_; }      // of the middle alone
    int context() const { return context_; }    // slots of the tiles in use, see AttnArgs::context
    int middle_context() const { return middle_context_; }

private:
    static constexpr int counts = 2 * max_regions + 2;  // even, for own_seq
    static size_t batch_words(int n_ubatch) { return counts + 6 * static_cast<size_t>(n_ubatch); }
    void copy_cells(const KvCache& cache, cudaStream_t stream);
    // The batch's slots hold its tokens, or none that is seen.
    void claim(int n_tokens, bool seen, cudaStream_t stream);

    std::vector<DeviceMemory> pos_;  // per region
    std::vector<DeviceMemory> seq_;
    uint64_t cells_version_ = 0;
    int capacity_ = 0;
    int middle_ = 0;
    int context_ = 0;
    int middle_context_ = 0;

    // [n_slots of 3 regions | n_full of 3 | n_middle | pad | pos | seq | region | slot | sequences as bits], each of the last five n_ubatch
    // long
    DeviceMemory batch_;
    std::unique_ptr<PinnedMemory> pinned_[2];
    int next_pinned_ = 0;
    int n_ubatch_ = 0;
    int n_unseen_ = 0;  // tokens of a batch that attends to its own rows
};

}  // namespace lkv::cuda
