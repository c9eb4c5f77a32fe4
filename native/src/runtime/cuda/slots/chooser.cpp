#include "runtime/cuda/slots/chooser.h"

#include <algorithm>

#include "runtime/cuda/attention.h"

namespace lkv::cuda {

namespace {

// Beside exact windows there are none: these hold a sequence's first and latest tokens.
constexpr int first_tokens = 4;
constexpr int latest_tokens = 256;

[[noreturn]] void refuse(const std::string& got) {
    fail("kv_read", "expected latents of K, rotated or absorbed, among whose rows tokens can choose; got ", got,
         "; leave out --kv-read");
}

// What a kernel that chooses depends on, of a layer's rows that may be chosen from.
LatentAttnParams described(const Model& model, const KvCache& cache, const GraphConstants& constants, int il) {
    const HParams& h = model.hparams();
    const LayerCacheSpec& spec = cache.rows().spec().layers[static_cast<size_t>(il)];
    LatentAttnParams p{};
    p.n_head = h.heads_of(il).n_head;
    p.n_kv = h.heads_of(il).n_kv;
    p.head_dim = h.heads_of(il).head_dim;
    p.k_group = spec.k.group;
    p.q_width = spec.k.rank_max();
    p.softcap = h.block.attention_softcap;
    p.alibi_slopes = constants.alibi_slopes.empty() ? nullptr : constants.alibi_slopes.data();
    for (int r = 0; r < cache.placement().n_regions(); r++) {
        if (!cache.rows().is_full(r, il)) p.regions[p.n_regions++] = cache.view(r, il);
    }
    return p;
}

}  // namespace

void Chooser::attach(const Model& model, const KvCache& cache, const GraphConstants& constants) {
    kv_read_ = cache.options().kv_read;
    if (kv_read_ == 0) return;
    const int middle = cache.placement().middle();
    capacity_ = cache.placement().cells(middle).capacity() / step_slots;
    if (capacity_ > most_choosable_steps) refuse("a context of more than 2,097,120 tokens");
    means_.resize(static_cast<size_t>(cache.placement().n_layers()));
    std::vector<AveragedRows> averaged;
    for (int il = layers_.run().first_layer; il < layers_.run().end_layer; il++) {
        if (!cache.rows().has_rows(il) || cache.placement().in_ring(il)) continue;
        const LayerCacheSpec& spec = cache.rows().spec().layers[static_cast<size_t>(il)];
        if (spec.k_path == KPath::rebuild || spec.key_of_value()) {
            refuse("keys that are made of their rows in each step");
        }
        if (spec.k_path == KPath::full) refuse("full rows of K, whose channels are in no order of importance");
        const LatentAttnParams latents = described(model, cache, constants, il);
        if (const char* const reason = refuses_choice(latents, device_)) refuse(reason);
        layers_[il].scored = scored_units(latents);
        const RowLayout& k = cache.rows().k_layout(middle, il);
        DeviceMemory& means = means_[static_cast<size_t>(il)];
        means = DeviceMemory(cache.rows().mean_bytes(il));
        averaged.push_back(
            {layers_[il].targets[middle], inputs_.seq(middle, layers_[il].cells), means.as<uint8_t>(), k.width});
        most_width_ = std::max(most_width_, k.width);
    }
    averaged_ = DeviceMemory::of(averaged);
    n_averaged_ = static_cast<int>(averaged.size());
    changed_ = DeviceMemory(static_cast<size_t>(capacity_) * sizeof(int32_t));
    for (auto& pinned : pinned_) pinned = std::make_unique<PinnedMemory>(changed_.bytes());
    left_.rows_read = DeviceMemory::of(std::vector<uint64_t>{0});
    left_.ends = DeviceMemory(most_direct_tokens * sizeof(int32_t));
    left_.steps =
        DeviceMemory(static_cast<size_t>(most_direct_tokens) * static_cast<size_t>(capacity_) * sizeof(int32_t));
}

void Chooser::begin(const KvCache& cache, const BatchSlots& batch, cudaStream_t stream) {
    active_ = false;
    const auto n = static_cast<int>(batch.pos.size());
    const int middle = cache.placement().middle();
    const Cells& cells = cache.placement().cells(middle);
    if (n_averaged_ == 0 || n > most_direct_tokens || cells.n_used() <= kv_read_) return;
    active_ = true;
    std::vector<int32_t> steps = cells.changed_steps(since_);
    steps.insert(steps.end(), unwritten_.begin(), unwritten_.end());
    std::sort(steps.begin(), steps.end());
    steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
    since_ = cells.n_changes();
    unwritten_.clear();
    for (const SlotRef& at : batch.slots) {
        if (at.region == middle) unwritten_.push_back(at.slot / step_slots);
    }
    if (steps.empty()) return;
    next_pinned_ ^= 1;
    std::copy(steps.begin(), steps.end(), pinned_[next_pinned_]->as<int32_t>());
    check(cudaMemcpyAsync(changed_.as<void>(), pinned_[next_pinned_]->as<void>(), steps.size() * sizeof(int32_t),
                          cudaMemcpyHostToDevice, stream),
          "a copy of steps");
    const BatchRowsAt unwritten{inputs_.region(), inputs_.slot(middle_cells), n, middle};
    check(average_steps(averaged_.as<AveragedRows>(), n_averaged_, most_width_, changed_.as<int32_t>(),
                        static_cast<int>(steps.size()), unwritten, stream),
          "means of steps");
}

void Chooser::prepare(const LatentAttnParams& latents, cudaStream_t stream) {
    const auto tokens = static_cast<size_t>(latents.n_tokens);
    const auto heads = static_cast<size_t>(latents.n_head);
    left_.hold(tokens, heads, static_cast<size_t>(capacity_), stream);
    of_warm_up_.hold(tokens, heads, 1, stream);
}

// Lists and counts may not move: plans have the lists.
void Chooser::Left::hold(size_t n_tokens, size_t n_heads, size_t n_steps, cudaStream_t stream) {
    const auto grow = [&](DeviceMemory& memory, size_t bytes) {
        if (bytes <= memory.bytes()) return;
        check(cudaStreamSynchronize(stream), "the stream");
        memory = DeviceMemory::of(std::vector<uint8_t>(bytes, 0));
    };
    grow(estimates, n_tokens * n_steps * n_heads * sizeof(float));
    grow(sums, n_tokens * most_parts * n_heads * sizeof(float2));
    grow(weights, n_tokens * n_steps * sizeof(float));
    grow(done, n_tokens * sizeof(uint32_t));
    grow(ends, n_tokens * sizeof(int32_t));
    grow(steps, n_tokens * n_steps * sizeof(int32_t));
    grow(rows_read, sizeof(uint64_t));
}

void Chooser::Left::lend(ChoiceArgs& args) const {
    args.estimates = estimates.as<float>();
    args.sums = sums.as<float2>();
    args.weights = weights.as<float>();
    args.done = done.as<uint32_t>();
    args.ends = ends.as<int32_t>();
    args.steps = steps.as<int32_t>();
    args.rows_read = rows_read.as<uint64_t>();
}

ChoiceArgs Chooser::args_of(const Plan& attention, int row_layer) const {
    ChoiceArgs args{};
    static_cast<Problem&>(args) = attention;
    args.own = {};
    args.means = means_[static_cast<size_t>(row_layer)].as<uint8_t>();
    args.units = layers_[row_layer].scored;
    args.n_keep = kv_read_ / step_slots;
    return args;
}

cudaError_t Chooser::score(const Plan& attention, int row_layer, bool beside_windows, cudaStream_t stream) {
    args_ = args_of(attention, row_layer);
    const Reads reads = layers_[row_layer].middle_alone ? Reads::middle : Reads::all;
    if (inputs_.apart(reads, false)) args_.own = inputs_.own_steps(reads, false);
    args_.always_first = beside_windows ? 0 : first_tokens;
    args_.always_last = beside_windows ? 0 : latest_tokens;
    args_.capacity = capacity_;
    args_.n_parts = parts_of_choice(args_, device_);
    left_.lend(args_);
    return score_steps(args_, device_, stream);
}

cudaError_t Chooser::choose(const CutProblem* windows, cudaStream_t stream) const {
    return choose_steps(args_, windows, stream);
}

cudaError_t Chooser::warm_up(const Plan& attention, int row_layer, cudaStream_t stream) const {
    ChoiceArgs args = args_of(attention, row_layer);
    args.capacity = args.n_parts = 1;
    of_warm_up_.lend(args);
    const cudaError_t error = score_steps(args, device_, stream);
    return error == cudaSuccess ? choose_steps(args, nullptr, stream) : error;
}

uint64_t Chooser::rows_read() const {
    if (n_averaged_ == 0) return 0;
    uint64_t n = 0;
    check(cudaDeviceSynchronize(), "the device");
    check(cudaMemcpy(&n, left_.rows_read.as<void>(), sizeof n, cudaMemcpyDeviceToHost), "a copy of a count");
    return n;
}

}  // namespace lkv::cuda
