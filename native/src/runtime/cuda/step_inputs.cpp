#include "runtime/cuda/step_inputs.h"

#include <utility>

#include <algorithm>

#include "ops/cuda/launch.h"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

void StepInputs::attach(const KvCache& cache) {
    for (int r = 0; r < cache.n_regions(); r++) {
        const auto capacity = static_cast<size_t>(cache.cells(r).capacity());
        middle_ = cache.cells(r).capacity();
        capacity_ += middle_;
        pos_.emplace_back(capacity * sizeof(int32_t));
        seq_.emplace_back(capacity * sizeof(uint64_t));
    }
    cells_version_ = ~uint64_t{0};
    const auto words = batch_words(std::max(cache.options().n_ubatch, 1));
    batch_ = DeviceMemory(words * sizeof(int32_t));
    for (auto& pinned : pinned_) pinned = std::make_unique<PinnedMemory>(words * sizeof(int32_t));
    n_ubatch_ = cache.options().n_ubatch;
}

void StepInputs::begin(const KvCache& cache, const BatchSlots& batch, cudaStream_t stream) {
    const auto n = batch.pos.size();
    // two host buffers in turn: the last copy from this one was waited for a step ago
    next_pinned_ ^= 1;
    auto* const to = pinned_[next_pinned_]->as<int32_t>();
    for (int r = 0; r < max_regions; r++) to[r] = r < cache.n_regions() ? cache.cells(r).end() : 0;
    context_ = 0;
    for (int r = 0; r < max_regions; r++) context_ += round_up(to[r], expand_tile);
    const int middle = cache.n_regions() - 1;
    for (int r = 0; r < max_regions; r++) to[max_regions + r] = r < middle ? to[r] : 0;
    if (batch.own_rows) to[max_regions + middle] = static_cast<int32_t>(n);
    to[2 * max_regions] = to[middle];
    middle_context_ = round_up(to[middle], expand_tile);
    int32_t* const fields = to + counts;
    auto* const own_seq = reinterpret_cast<uint64_t*>(fields + 4 * static_cast<size_t>(n_ubatch_));
    for (size_t i = 0; i < n; i++) {
        fields[i] = batch.pos[i];
        fields[static_cast<size_t>(n_ubatch_) + i] = batch.seq[i];
        fields[2 * static_cast<size_t>(n_ubatch_) + i] = batch.slots[i].region;
        fields[3 * static_cast<size_t>(n_ubatch_) + i] = batch.slots[i].slot;
        own_seq[i] = uint64_t{1} << batch.seq[i];
    }
    check(cudaMemcpyAsync(batch_.as<void>(), to, batch_words(n_ubatch_) * sizeof(int32_t), cudaMemcpyHostToDevice,
                          stream),
          "a copy of the batch");
    if (cache.cells_version() != cells_version_) {
        cells_version_ = cache.cells_version();
        copy_cells(cache, stream);
        if (batch.own_rows) claim(static_cast<int>(n), false, stream);
    } else {
        claim(static_cast<int>(n), !batch.own_rows, stream);
    }
    n_unseen_ = batch.own_rows ? static_cast<int>(n) : 0;
}

void StepInputs::end(cudaStream_t stream) {
    if (n_unseen_ > 0) claim(std::exchange(n_unseen_, 0), true, stream);
}

void StepInputs::copy_cells(const KvCache& cache, cudaStream_t stream) {
    for (int r = 0; r < cache.n_regions(); r++) {
        const Cells& cells = cache.cells(r);
        const auto end = static_cast<size_t>(cells.end());
        const auto index = static_cast<size_t>(r);
        check(cudaMemcpyAsync(pos_[index].as<void>(), cells.pos_data(), end * sizeof(int32_t), cudaMemcpyHostToDevice,
                              stream),
              "a copy of positions");
        check(cudaMemcpyAsync(seq_[index].as<void>(), cells.seq_data(), end * sizeof(uint64_t), cudaMemcpyHostToDevice,
                              stream),
              "a copy of sequences");
    }
}

void StepInputs::claim(int n_tokens, bool seen, cudaStream_t stream) {
    ClaimArgs claim{};
    claim.q_pos = q_pos();
    claim.q_seq = q_seq();
    claim.region = region();
    claim.slot = slot();
    claim.seen = seen ? 1 : 0;
    for (size_t r = 0; r < pos_.size(); r++) {
        claim.pos[r] = pos_[r].as<int32_t>();
        claim.seq[r] = seq_[r].as<uint64_t>();
    }
    check(claim_slots(claim, n_tokens, stream), "claiming slots");
}

}  // namespace lkv::cuda
