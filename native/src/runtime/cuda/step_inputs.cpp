#include "runtime/cuda/step_inputs.h"

#include <algorithm>
#include <span>
#include <utility>

#include "ops/cuda/routes.h"
#include "ops/cuda/rows/rows.h"

namespace lkv::cuda {

namespace {

int steps_of(int slots) { return (slots + step_slots - 1) / step_slots; }

}  // namespace

StepLayout::StepLayout(size_t n_ubatch, size_t n_evicting) {
    const auto place = [this](size_t n, size_t multiple = 1) {
        const size_t at = (n_words + multiple - 1) / multiple * multiple;
        n_words = at + n;
        return at;
    };
    for (size_t i = 0; i < own_cells + n_evicting; i++) {
        const size_t n_slots = place(max_regions);
        const size_t n_middle = place(1);
        cells.push_back({n_slots, n_middle, place(n_ubatch)});
    }
    n_full = place(max_regions);
    pos = place(n_ubatch);
    seq = place(n_ubatch);
    region = place(n_ubatch);
    own_seq = place(2 * n_ubatch, 2);
    weights = place(n_evicting > 0 ? 2 * n_ubatch : 0, 2);
}

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
        cells_of_.push_back(cache.placement().in_ring(il) ? ring_cells : middle_cells);
        if (!cache.placement().evicts(il)) continue;
        cells_of_.back() = own_cells + static_cast<int>(evicting_.size());
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
    layout_ = StepLayout(static_cast<size_t>(cache.options().ubatches.longest), evicting_.size());
    batch_ = DeviceMemory(layout_.n_words * sizeof(int32_t));
    for (auto& pinned : pinned_) pinned = std::make_unique<PinnedMemory>(batch_.bytes());
}

void StepInputs::begin(const KvCache& cache, const BatchSlots& batch, cudaStream_t stream) {
    const auto n = batch.pos.size();
    // two host buffers in turn: the last copy from this one was waited for a step ago
    next_pinned_ ^= 1;
    auto* const to = pinned_[next_pinned_]->as<int32_t>();
    const int middle = n_regions_ - 1;
    const int ends[] = {cache.placement().cells(middle).end(),
                        cache.placement().ring() != nullptr ? cache.placement().ring()->cells().end() : 0};
    int32_t* const full = to + layout_.n_full;
    exact_context_ = 0;
    for (int r = 0; r < max_regions; r++) {
        const int exact = r < middle ? cache.placement().cells(r).end() : 0;
        full[r] = to[of(middle_cells).n_slots + static_cast<size_t>(r)] =
            to[of(ring_cells).n_slots + static_cast<size_t>(r)] = exact;
        exact_context_ += round_up(exact, context_step);
    }
    if (batch.own_rows) full[middle] = static_cast<int32_t>(n);
    for (const int in_ring : {0, 1}) {
        const StepLayout::OfCells& at = of(in_ring);
        to[at.n_slots + static_cast<size_t>(middle)] = to[at.n_middle] = ends[in_ring];
        middle_context_[in_ring] = round_up(ends[in_ring], context_step);
    }
    auto* const own_seq = reinterpret_cast<uint64_t*>(to + layout_.own_seq);
    for (size_t i = 0; i < n; i++) {
        const SlotRef& at = batch.slots[i];
        to[layout_.pos + i] = batch.pos[i];
        to[layout_.seq + i] = batch.seq[i];
        to[layout_.region + i] = at.region;
        to[of(middle_cells).slot + i] = at.slot;
        to[of(ring_cells).slot + i] = at.region == middle ? at.ring : at.slot;
        own_seq[i] = bit(batch.seq[i]);
    }
    if (!evicting_.empty()) put_evicting(cache, batch, to);
    check(cudaMemcpyAsync(batch_.as<void>(), to, batch_.bytes(), cudaMemcpyHostToDevice, stream),
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
    find_apart(batch, stream);
}

// What layers that evict read, of slots of their own; and how queries count in the masses.
void StepInputs::put_evicting(const KvCache& cache, const BatchSlots& batch, int32_t* to) {
    const int middle = n_regions_ - 1;
    auto* const weights = reinterpret_cast<QueryMass*>(to + layout_.weights);
    const std::span<const QueryWeight> queries = cache.placement().eviction()->weights();
    for (size_t i = 0; i < batch.pos.size(); i++) weights[i] = {queries[i].weight, 1.0F / queries[i].temperature};
    middle_context_[0] = 0;
    for (size_t e = 0; e < evicting_.size(); e++) {
        const StepLayout::OfCells& at = of(own_cells + static_cast<int>(e));
        const int end = cache.placement().cells(middle, evicting_[e]).end();
        std::copy_n(to + of(middle_cells).n_slots, max_regions, to + at.n_slots);
        to[at.n_slots + static_cast<size_t>(middle)] = to[at.n_middle] = end;
        for (size_t i = 0; i < batch.slots.size(); i++) {
            to[at.slot + i] = cache.placement().row_of(batch.slots[i], evicting_[e]).slot;
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

void StepInputs::find_apart(const BatchSlots& batch, cudaStream_t stream) {
    const auto n = static_cast<int>(batch.pos.size());
    for (const int in_ring : {0, 1}) {
        apart_[in_ring] = own_[in_ring].bytes() == 0 ? Apart{} : batch.apart[in_ring];
        if (!apart_[in_ring].middle && !apart_[in_ring].windows) continue;
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
    for (int cells = 0; cells < static_cast<int>(layout_.cells.size()); cells++) {
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
