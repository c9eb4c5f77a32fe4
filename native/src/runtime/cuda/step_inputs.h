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

// Which cells hold a layer's middle: those of all layers, the ring, or its own (under eviction: from own_cells on, a number each).
enum CellsNumber : int { middle_cells = 0, ring_cells = 1, own_cells = 2 };

// Where in a step's words, of four bytes, each input is: on the host, which writes them, as on the GPU.
struct StepLayout {
    struct OfCells {
        size_t n_slots;   // of every region
        size_t n_middle;  // of the last one
        size_t slot;      // [n_ubatch] that tokens go to
    };
    std::vector<OfCells> cells;
    size_t n_full = 0;  // slots of the exact windows, after them the batch's own rows
    size_t pos = 0;     // [n_ubatch] each
    size_t seq = 0;
    size_t region = 0;
    size_t own_seq = 0;  // sequences as bits, of two words
    size_t weights = 0;  // under eviction: QueryMass
    size_t n_words = 0;

    StepLayout() = default;
    StepLayout(size_t n_ubatch, size_t n_evicting);
};

class StepInputs {
public:
    // Once, before any step.
    void attach(const KvCache& cache);
    // Enqueues this step's copies, after the cache claimed its slots.
    void begin(const KvCache& cache, const BatchSlots& batch, cudaStream_t stream);
    // After the step: shows what it stored, where its tokens attended to their own rows.
    void end(cudaStream_t stream);

    // In which cells a layer's rows of the middle are (CellsNumber).
    int cells_of(int layer) const { return cells_of_[static_cast<size_t>(layer)]; }
    const int32_t* n_slots(int cells) const { return words(of(cells).n_slots); }
    const int32_t* n_full() const { return words(layout_.n_full); }
    const int32_t* n_middle(int cells) const { return words(of(cells).n_middle); }
    const int32_t* q_pos() const { return words(layout_.pos); }
    const int32_t* q_seq() const { return words(layout_.seq); }
    const int32_t* region() const { return words(layout_.region); }
    const int32_t* slot(int cells) const { return words(of(cells).slot); }
    // Under eviction: how the batch's queries count.
    const QueryMass* weights() const { return reinterpret_cast<const QueryMass*>(words(layout_.weights)); }
    // the batch's own rows as a region
    const uint64_t* own_seq() const { return reinterpret_cast<const uint64_t*>(words(layout_.own_seq)); }
    const int32_t* pos(int of_region, int cells) const { return pos_[index_of(of_region, cells)].as<int32_t>(); }
    const uint64_t* seq(int of_region, int cells) const { return seq_[index_of(of_region, cells)].as<uint64_t>(); }

    // Whether this step's tokens should be attended to apart (Problem::own), and what they then read; no ends: of a single sequence.
    bool apart(Reads what, bool in_ring) const {
        const Apart& is = apart_[in_ring ? 1 : 0];
        return what == Reads::windows ? is.windows : is.middle;
    }
    OwnSteps own_steps(Reads what, bool in_ring) const;

    // Slots of the exact windows, and of the middle (under eviction of one layer's).
    int exact() const { return exact_; }
    int middle(bool in_ring) const { return middle_[in_ring ? 1 : 0]; }
    // Slots of the tiles in use, see Plan::context: in the exact windows, and in the middle.
    int exact_context() const { return exact_context_; }
    int middle_context(bool in_ring) const { return middle_context_[in_ring ? 1 : 0]; }

private:
    const StepLayout::OfCells& of(int cells) const { return layout_.cells[static_cast<size_t>(cells)]; }
    const int32_t* words(size_t at) const { return batch_.as<int32_t>() + at; }
    // After the regions' cells are the ring's, then those of layers that evict.
    size_t index_of(int region, int cells) const {
        return static_cast<size_t>(region == n_regions_ - 1 && cells > 0 ? n_regions_ + cells - 1 : region);
    }
    const Cells& cells_at(const KvCache& cache, size_t index) const;
    void put_evicting(const KvCache& cache, const BatchSlots& batch, int32_t* to);
    void copy_cells(const KvCache& cache, cudaStream_t stream);
    int list_capacity(bool in_ring) const;
    void find_apart(const BatchSlots& batch, cudaStream_t stream);
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
    Apart apart_[2];
    // begins of the middle, or of the ring, [most_direct_tokens]; ends [the same]; [the same][steps of all regions]. None of a single sequence.
    DeviceMemory own_[2];

    StepLayout layout_;
    DeviceMemory batch_;
    std::unique_ptr<PinnedMemory> pinned_[2];
    int next_pinned_ = 0;
    int n_unseen_ = 0;  // tokens of a batch that attends to its own rows
    // For each region: all marks in use lie before this slot. New slots need not be neighbours; those between them are free here too.
    std::vector<int> marked_;
};

}  // namespace lkv::cuda
