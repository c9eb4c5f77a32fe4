#include "runtime/cuda/step_inputs.h"

#include <algorithm>
#include <span>
#include <utility>

#include "ops/cuda/rows/rows.h"

namespace lkv::cuda {

namespace {

int steps_of(int slots) { return (slots + step_slots - 1) / step_slots; }

}  // namespace

void StepInputs::attach(const KvCache& cache) {
    n_regions_ = cache.placement().n_regions();
    const int middle = n_regions_ - 1;
    const auto hold = [this](int n_slots) {
        pos_.emplace_back(static_cast<size_t>(n_slots) * sizeof(int32_t));
        seq_.push_back(DeviceMemory::of(std::vector<uint64_t>(static_cast<size_t>(n_slots), 0)));
        marked_.push_back(0);
        return n_slots;
    };
    for (int r = 0; r < middle; r++) exact_ += hold(cache.placement().cells(r).capacity());
    const bool evicts = cache.placement().eviction() != nullptr;
    middle_[0] = hold(evicts ? 0 : cache.placement().cells(middle).capacity());
    middle_[1] = hold(cache.placement().ring() != nullptr ? cache.placement().ring()->cells().capacity() : 0);
    for (int il = 0; il < cache.placement().n_layers(); il++) {
        cells_of_.push_back(cache.placement().in_ring(il) ? of_ring : 0);
        if (!cache.placement().evicts(il)) continue;
        cells_of_.back() = first_own + static_cast<int>(evicting_.size());
        evicting_.push_back(il);
        middle_[0] = hold(cache.placement().cells(middle, il).capacity());
    }
    for (const int in_ring : {0, 1}) {
        // tokens of layers that evict read all slots
        if (cache.options().n_seq_max == 1 || middle_[in_ring] == 0 || (in_ring == 0 && evicts)) continue;
        const auto lists = static_cast<size_t>(2 + list_capacity(in_ring != 0));
        own_[in_ring] = DeviceMemory(static_cast<size_t>(most_direct_tokens) * lists * sizeof(int32_t));
    }
    cells_version_ = ~uint64_t{0};
    n_ubatch_ = cache.options().ubatches.longest;
    const size_t words = batch_words();
    batch_ = DeviceMemory(words * sizeof(int32_t));
    for (auto& pinned : pinned_) pinned = std::make_unique<PinnedMemory>(words * sizeof(int32_t));
}

void StepInputs::begin(const KvCache& cache, const BatchSlots& batch, cudaStream_t stream) {
    const auto n = batch.pos.size();
    // two host buffers in turn: the last copy from this one was waited for a step ago
    next_pinned_ ^= 1;
    auto* const to = pinned_[next_pinned_]->as<int32_t>();
    const int middle = n_regions_ - 1;
    const int ends[] = {cache.placement().cells(middle).end(),
                        cache.placement().ring() != nullptr ? cache.placement().ring()->cells().end() : 0};
    int32_t* const full = to + 2 * max_regions;
    exact_context_ = 0;
    for (int r = 0; r < max_regions; r++) {
        const int exact = r < middle ? cache.placement().cells(r).end() : 0;
        full[r] = to[r] = to[max_regions + r] = exact;
        exact_context_ += round_up(exact, context_step);
    }
    if (batch.own_rows) full[middle] = static_cast<int32_t>(n);
    for (const int in_ring : {0, 1}) {
        to[in_ring * max_regions + middle] = to[3 * max_regions + in_ring] = ends[in_ring];
        middle_context_[in_ring] = round_up(ends[in_ring], context_step);
    }
    int32_t* const fields = to + counts;
    auto* const own_seq = reinterpret_cast<uint64_t*>(fields + 4 * static_cast<size_t>(n_ubatch_));
    for (size_t i = 0; i < n; i++) {
        fields[i] = batch.pos[i];
        fields[static_cast<size_t>(n_ubatch_) + i] = batch.seq[i];
        fields[2 * static_cast<size_t>(n_ubatch_) + i] = batch.slots[i].region;
        fields[3 * static_cast<size_t>(n_ubatch_) + i] = batch.slots[i].slot;
        own_seq[i] = bit(batch.seq[i]);
        const SlotRef& at = batch.slots[i];
        fields[6 * static_cast<size_t>(n_ubatch_) + i] = at.region == middle ? at.ring : at.slot;
    }
    if (!evicting_.empty()) put_evicting(cache, batch, to);
    check(cudaMemcpyAsync(batch_.as<void>(), to, batch_words() * sizeof(int32_t), cudaMemcpyHostToDevice, stream),
          "a copy of the batch");
    for (size_t index = 0; index < pos_.size(); index++) {
        if (pos_[index].bytes() != 0) marked_[index] = std::max(marked_[index], cells_at(cache, index).end());
    }
    if (cache.placement().version() != cells_version_) {
        cells_version_ = cache.placement().version();
        copy_cells(cache, stream);
        if (batch.own_rows) claim(static_cast<int>(n), false, stream);
    } else {
        claim(static_cast<int>(n), !batch.own_rows, stream);
    }
    n_unseen_ = batch.own_rows ? static_cast<int>(n) : 0;
    find_apart(cache, batch, stream);
}

// What layers that evict read, of slots of their own; and how queries count in the masses.
void StepInputs::put_evicting(const KvCache& cache, const BatchSlots& batch, int32_t* to) {
    const int middle = n_regions_ - 1;
    auto* const weights = reinterpret_cast<QueryMass*>(to + counts + 7 * static_cast<size_t>(n_ubatch_));
    const std::span<const QueryWeight> queries = cache.placement().eviction()->weights();
    for (size_t i = 0; i < batch.pos.size(); i++) weights[i] = {queries[i].weight, 1.0F / queries[i].temperature};
    middle_context_[0] = 0;
    for (size_t e = 0; e < evicting_.size(); e++) {
        int32_t* const own = to + own_at(first_own + static_cast<int>(e));
        const int end = cache.placement().cells(middle, evicting_[e]).end();
        std::copy_n(to, middle, own);
        std::fill(own + middle, own + max_regions, 0);
        own[middle] = own[max_regions] = end;
        for (size_t i = 0; i < batch.slots.size(); i++) {
            own[static_cast<size_t>(own_counts) + i] = cache.placement().row_of(batch.slots[i], evicting_[e]).slot;
        }
        middle_context_[0] = std::max(middle_context_[0], round_up(end, context_step));
    }
}

// Steps that a token's list has room for.
int StepInputs::list_capacity(bool in_ring) const { return steps_of(exact_) + n_regions_ + steps_of(middle(in_ring)); }

OwnSteps StepInputs::own_steps(Reads what, bool in_ring) const {
    const DeviceMemory& memory = own_[in_ring ? 1 : 0];
    if (memory.bytes() == 0) return {};
    const auto* const begins = memory.as<int32_t>();
    const int32_t* const ends = begins + most_direct_tokens;
    return {what == Reads::middle ? begins : nullptr, what == Reads::windows ? begins : ends, ends + most_direct_tokens,
            list_capacity(in_ring)};
}

void StepInputs::find_apart(const KvCache& cache, const BatchSlots& batch, cudaStream_t stream) {
    const auto n = static_cast<int>(batch.pos.size());
    const Placement& placement = cache.placement();
    int64_t exact = 0;  // slots of the windows in use
    for (int r = 0; r + 1 < n_regions_; r++) exact += placement.cells(r).end();
    for (const int in_ring : {0, 1}) {
        apart_[in_ring] = windows_apart_[in_ring] = false;
        if (own_[in_ring].bytes() == 0 || n > most_direct_tokens || batch.own_rows) continue;
        const int64_t others = in_ring != 0 ? placement.ring()->cells().end() : placement.cells(n_regions_ - 1).end();
        int64_t seen = 0;
        int64_t seen_exact = 0;
        for (const int32_t pos : batch.pos) {
            seen += in_ring != 0 ? std::min(pos + 1, placement.ring()->window()) : pos + 1;
            seen_exact +=
                std::min(pos + 1, placement.options().sink + placement.options().window(pos + 1) + demotion_batch);
        }
        apart_[in_ring] = less_work_apart(n, seen, others);
        windows_apart_[in_ring] = less_work_apart(n, seen_exact, exact);
        if (!apart_[in_ring] && !windows_apart_[in_ring]) continue;
        FindStepsArgs args{};
        args.q_seq = q_seq();
        for (int r = 0; r < n_regions_; r++) args.seq[r] = seq(r, in_ring);
        args.n_slots = n_slots(in_ring);
        args.n_regions = n_regions_;
        args.begins = own_[in_ring].as<int32_t>();
        args.ends = args.begins + most_direct_tokens;
        args.steps = args.ends + most_direct_tokens;
        args.capacity = list_capacity(in_ring != 0);
        check(find_own_steps(args, n, stream), "finding the slots of a batch's sequences");
    }
}

void StepInputs::end(cudaStream_t stream) {
    if (n_unseen_ > 0) claim(std::exchange(n_unseen_, 0), true, stream);
}

const Cells& StepInputs::cells_at(const KvCache& cache, size_t index) const {
    const auto n_regions = static_cast<size_t>(n_regions_);
    if (index < n_regions) return cache.placement().cells(static_cast<int>(index));
    if (index == n_regions) return cache.placement().ring()->cells();
    return cache.placement().cells(n_regions_ - 1, evicting_[index - n_regions - 1]);
}

void StepInputs::copy_cells(const KvCache& cache, cudaStream_t stream) {
    for (size_t index = 0; index < pos_.size(); index++) {
        if (pos_[index].bytes() == 0) continue;
        const Cells& cells = cells_at(cache, index);
        const auto end = static_cast<size_t>(std::max(cells.end(), std::exchange(marked_[index], cells.end())));
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
    for (int cells = 0; cells < first_own + static_cast<int>(evicting_.size()); cells++) {
        if (pos_[index_of(n_regions_ - 1, cells)].bytes() == 0) continue;
        claim.region = region();
        claim.slot = slot(cells);
        claim.seen = seen ? 1 : 0;
        for (int r = 0; r < n_regions_; r++) {
            claim.pos[r] = pos_[index_of(r, cells)].as<int32_t>();
            claim.seq[r] = seq_[index_of(r, cells)].as<uint64_t>();
        }
        check(claim_slots(claim, n_tokens, stream), "claiming slots");
    }
}

}  // namespace lkv::cuda
