#include "runtime/cuda/slots/chooser.h"

#include <algorithm>

#include "runtime/cuda/attention.h"

namespace lkv::cuda {

namespace {

// Beside exact windows there are none: these hold a sequence's first and latest tokens.
constexpr int first_tokens = 4;
constexpr int latest_tokens = 256;

[[noreturn]] void refuse(const std::string& got) {
    fail("kv_read", "expected rows among which tokens can choose: compressed ones beside exact windows, with K rotated or absorbed, or ",
         "full ones, in f16, q8_0, q4_0 or formats of segments; got ", got, "; leave out --kv-read");
}

}  // namespace

void Chooser::attach(const KvCache& cache) {
    n_read_tokens_ = cache.options().kv_read;
    if (n_read_tokens_ == 0) return;
    const int middle = cache.placement().middle();
    capacity_ = cache.placement().cells(middle).capacity() / step_slots;
    means_.resize(static_cast<size_t>(cache.placement().n_layers()));
    std::vector<AveragedRows> averaged;
    for (int il = layers_.run().first_layer; il < layers_.run().end_layer; il++) {
        if (!cache.rows().has_rows(il) || cache.placement().in_ring(il)) continue;
        const LayerCacheSpec& spec = cache.rows().spec().layers[static_cast<size_t>(il)];
        if (spec.k_path == KPath::rebuild || spec.key_of_value()) refuse("keys that are made of their rows in each step");
        const RowLayout& k = cache.rows().k_layout(middle, il);
        DeviceMemory& means = means_[static_cast<size_t>(il)];
        means = DeviceMemory(cache.rows().mean_bytes(il));
        averaged.push_back({layers_[il].targets[middle], inputs_.seq(middle, layers_[il].cells), means.as<uint8_t>(),
                            k.width});
        most_width_ = std::max(most_width_, k.width);
    }
    averaged_ = DeviceMemory::of(averaged);
    n_averaged_ = static_cast<int>(averaged.size());
    changed_ = DeviceMemory(static_cast<size_t>(capacity_) * sizeof(int32_t));
    for (auto& pinned : pinned_) pinned = std::make_unique<PinnedMemory>(changed_.bytes());
    n_read_ = DeviceMemory::of(std::vector<uint64_t>{0});
    ends_ = DeviceMemory(most_direct_tokens * sizeof(int32_t));
    steps_ = DeviceMemory(static_cast<size_t>(most_direct_tokens) * static_cast<size_t>(capacity_) * sizeof(int32_t));
}

void Chooser::begin(const KvCache& cache, const BatchSlots& batch, cudaStream_t stream) {
    active_ = false;
    const auto n = static_cast<int>(batch.pos.size());
    const int middle = cache.placement().middle();
    const Cells& cells = cache.placement().cells(middle);
    if (n_averaged_ == 0 || n > most_direct_tokens || cells.n_used() <= n_read_tokens_) return;
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

void Chooser::prepare(int row_layer, const LatentAttnParams& latents, cudaStream_t stream) {
    if (const char* const reason = refuses_choice(latents)) refuse(reason);
    layers_[row_layer].scored = scored_units(latents);
    const auto tokens = static_cast<size_t>(latents.n_tokens);
    const size_t steps = tokens * static_cast<size_t>(capacity_);
    const auto heads = static_cast<size_t>(latents.n_head);
    const auto hold = [&](DeviceMemory& memory, size_t bytes) {
        if (bytes <= memory.bytes()) return;
        check(cudaStreamSynchronize(stream), "the stream");
        memory = DeviceMemory::of(std::vector<uint8_t>(bytes, 0));
    };
    hold(estimates_, steps * heads * sizeof(float));
    hold(sums_, tokens * most_parts * heads * sizeof(float2));
    hold(weights_, steps * sizeof(float));
    hold(done_, tokens * sizeof(uint32_t));
}

cudaError_t Chooser::score(const Plan& attention, int row_layer, bool beside_windows, cudaStream_t stream) {
    const Layer& layer = layers_[row_layer];
    args_ = {};
    static_cast<Problem&>(args_) = attention;
    const Reads reads = layer.middle_alone ? Reads::middle : Reads::all;
    args_.own = inputs_.apart(reads, false) ? inputs_.own_steps(reads, false) : OwnSteps{};
    args_.means = means_[static_cast<size_t>(row_layer)].as<uint8_t>();
    args_.units = layer.scored;
    args_.n_parts = parts_of_choice(args_, device_);
    args_.always_first = beside_windows ? 0 : first_tokens;
    args_.always_last = beside_windows ? 0 : latest_tokens;
    args_.n_keep = n_read_tokens_ / step_slots;
    args_.capacity = capacity_;
    args_.estimates = estimates_.as<float>();
    args_.sums = sums_.as<float2>();
    args_.weights = weights_.as<float>();
    args_.done = done_.as<uint32_t>();
    args_.ends = ends_.as<int32_t>();
    args_.steps = steps_.as<int32_t>();
    args_.n_read = n_read_.as<uint64_t>();
    return score_steps(args_, device_, stream);
}

cudaError_t Chooser::choose(const CutProblem* windows, cudaStream_t stream) const {
    return choose_steps(args_, windows, stream);
}

uint64_t Chooser::n_read() const {
    if (n_averaged_ == 0) return 0;
    uint64_t n = 0;
    check(cudaDeviceSynchronize(), "the device");
    check(cudaMemcpy(&n, n_read_.as<void>(), sizeof n, cudaMemcpyDeviceToHost), "a copy of a count");
    return n;
}

}  // namespace lkv::cuda
