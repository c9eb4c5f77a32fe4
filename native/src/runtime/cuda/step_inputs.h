// What changes from step to step, at addresses that do not: slots in use, positions and sequences of the cache's slots, and where the
// batch's tokens go. So one recorded graph serves a cache as it fills.
#pragma once

#include <memory>
#include <vector>

#include "cache/kv_cache.h"
#include "graph/graph.h"
#include "ops/cuda/gpu/device_memory.h"
#include "ops/cuda/mass/mass.h"
#include "ops/cuda/problem.h"

namespace lkv::cuda {

// The regions of a problem: the exact windows, the middle (or in its place the ring), or both.
enum class Reads { windows, middle, all };

class StepInputs {
public:
    // Once, before any step.
    void attach(const KvCache& cache);
    // Enqueues this step's copies, after the cache claimed its slots.
    void begin(const KvCache& cache, const BatchSlots& batch, cudaStream_t stream);
    // After the step: shows what it stored, where its tokens attended to their own rows.
    void end(cudaStream_t stream);

    // In which cells a layer's rows of the middle are: in the middle's, in the ring's, or in its own (under eviction: from first_own on).
    int cells_of(int layer) const { return cells_of_[static_cast<size_t>(layer)]; }
    const int32_t* n_slots(int cells) const {
        return cells < first_own ? batch_.as<int32_t>() + cells * max_regions : own_words(cells);
    }
    // Slot counts: the exact windows, after them the batch's own rows, then the middle.
    const int32_t* n_full() const { return batch_.as<int32_t>() + 2 * max_regions; }
    const int32_t* n_middle(int cells) const {
        return cells < first_own ? batch_.as<int32_t>() + 3 * max_regions + cells : own_words(cells) + max_regions;
    }
    const int32_t* q_pos() const { return batch_.as<int32_t>() + counts; }
    const int32_t* q_seq() const { return q_pos() + n_ubatch_; }
    const int32_t* region() const { return q_pos() + 2 * n_ubatch_; }
    const int32_t* slot(int cells) const {
        return cells < first_own ? q_pos() + (cells == of_ring ? 6 : 3) * n_ubatch_ : own_words(cells) + own_counts;
    }
    // Under eviction: how the batch's queries count.
    const QueryMass* weights() const { return reinterpret_cast<const QueryMass*>(q_pos() + 7 * n_ubatch_); }
    // the batch's own rows as a region
    const uint64_t* own_seq() const { return reinterpret_cast<const uint64_t*>(q_pos() + 4 * n_ubatch_); }
    const int32_t* pos(int of_region, int cells) const { return pos_[index_of(of_region, cells)].as<int32_t>(); }
    const uint64_t* seq(int of_region, int cells) const { return seq_[index_of(of_region, cells)].as<uint64_t>(); }

    // Whether this step's tokens should be attended to apart (Problem::own), and what they then read; no ends: of a single sequence.
    bool apart(Reads what, bool in_ring) const {
        return (what == Reads::windows ? windows_apart_ : apart_)[in_ring ? 1 : 0];
    }
    OwnSteps own_steps(Reads what, bool in_ring) const;

    // Slots of the exact windows, and of the middle (under eviction of one layer's).
    int exact() const { return exact_; }
    int middle(bool in_ring) const { return middle_[in_ring ? 1 : 0]; }
    // Slots of the tiles in use, see Plan::context: in the exact windows, and in the middle.
    int exact_context() const { return exact_context_; }
    int middle_context(bool in_ring) const { return middle_context_[in_ring ? 1 : 0]; }

private:
    static constexpr int of_ring = 1;
    static constexpr int first_own = 2;
    static constexpr int counts = 3 * max_regions + 3;  // even, for own_seq
    static constexpr int own_counts = max_regions + 1;  // of a layer that evicts
    // Words before those of such a layer.
    size_t own_at(int cells) const {
        return counts + 9 * static_cast<size_t>(n_ubatch_) +
               static_cast<size_t>(cells - first_own) * (own_counts + static_cast<size_t>(n_ubatch_));
    }
    const int32_t* own_words(int cells) const { return batch_.as<int32_t>() + own_at(cells); }
    size_t batch_words() const {
        return evicting_.empty() ? counts + 7 * static_cast<size_t>(n_ubatch_)
                                 : own_at(first_own + static_cast<int>(evicting_.size()));
    }
    // After the regions' cells are the ring's, then those of layers that evict.
    size_t index_of(int region, int cells) const {
        return static_cast<size_t>(region == n_regions_ - 1 && cells > 0 ? n_regions_ + cells - 1 : region);
    }
    const Cells& cells_at(const KvCache& cache, size_t index) const;
    void put_evicting(const KvCache& cache, const BatchSlots& batch, int32_t* to);
    void copy_cells(const KvCache& cache, cudaStream_t stream);
    int list_capacity(bool in_ring) const;
    void find_apart(const KvCache& cache, const BatchSlots& batch, cudaStream_t stream);
    // The batch's slots hold its tokens, or none that is seen.
    void claim(int n_tokens, bool seen, cudaStream_t stream);

    // Per region, of the ring, and of layers that evict; none of cells that no layer reads.
    std::vector<DeviceMemory> pos_;
    std::vector<DeviceMemory> seq_;
    std::vector<int> cells_of_;  // of every layer
    std::vector<int> evicting_;  // layers
    uint64_t cells_version_ = 0;
    int n_regions_ = 0;
    int exact_ = 0;
    int middle_[2] = {};  // and the ring
    int exact_context_ = 0;
    int middle_context_[2] = {};
    bool apart_[2] = {};
    bool windows_apart_[2] = {};
    // begins of the middle, or of the ring, [most_direct_tokens]; ends [the same]; [the same][steps of all regions]. None of a single sequence.
    DeviceMemory own_[2];

    // [n_slots of 3 regions | with the ring | n_full of 3 | n_middle | of the ring | pad | pos | seq | region | slot | sequences as bits
    // (two words each) | slot with the ring], each of the last six n_ubatch long; under eviction after them
    // [weights, two words each | per layer that evicts: n_slots of 3 regions, n_middle, slot]
    DeviceMemory batch_;
    std::unique_ptr<PinnedMemory> pinned_[2];
    int next_pinned_ = 0;
    int n_ubatch_ = 0;
    int n_unseen_ = 0;  // tokens of a batch that attends to its own rows
    // For each region: all marks in use lie before this slot. New slots need not be neighbours; those between them are free here too.
    std::vector<int> marked_;
};

}  // namespace lkv::cuda
